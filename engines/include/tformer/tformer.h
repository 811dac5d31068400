/* libtformer: runs the bundles of tformer-deploy. Text in, translations out, token for token what Python gives.
 *
 *   tformer_options *options = tformer_options_new();
 *   tformer_options_set(options, "beams", "5");
 *   tformer_model *model;
 *   if (tformer_model_open("bundles/numbers", options, &model)) puts(tformer_error());
 *   tformer_translator *translator;
 *   tformer_translator_new(model, options, &translator);
 *   tformer_text line = {"forty-two", 9};
 *   tformer_results *results;
 *   tformer_translate(translator, &line, NULL, 1, 0, &results);
 *   puts(tformer_results_output(results, 0, 0)->text);
 *
 * Threads: one model, many translators. A model never changes once it is open, and any number of threads may make
 * translators of it; all of them share its weights. A translator is used by one thread at a time; only `tformer_cancel`
 * may be called from another. Results and options belong to whoever made them. A model may be closed before its
 * translators: what they share is freed with the last of them. The first model that is opened puts ORT_DISABLE_TELEMETRY
 * into the environment; where other threads may read that at the same time, set it yourself before.
 *
 * Errors: functions that can fail return a status, 0 where all is well. `tformer_error` then says in one line what is
 * wrong, where, and how to fix it. No function throws or ends the process. A callback must not throw. Nor may a thread be
 * ended while it is in a call, by pthread_exit in a callback or by pthread_cancel: that ends the process.
 *
 * Text is UTF-8, with its size in bytes. What comes back ends in a zero byte as well.
 */
#ifndef TFORMER_H
#define TFORMER_H

#include <stddef.h>
#include <stdint.h>

#if defined(TFORMER_BUILDING)
#define TFORMER_API __attribute__((visibility("default")))
#else
#define TFORMER_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What kind of error it is. Later versions may add some. */
typedef enum tformer_status {
  TFORMER_OK = 0,
  TFORMER_USAGE = 1,       /* an option, name or argument that does not exist or does not fit the others */
  TFORMER_BUNDLE = 2,      /* a bundle that is missing, damaged, edited or of a newer format */
  TFORMER_LIMIT = 3,       /* a request beyond what the model or the bundle's recipe allows */
  TFORMER_TEXT = 4,        /* text that cannot be used */
  TFORMER_ENGINE = 5,      /* ONNX Runtime, TensorRT or CUDA stopped with an error of its own */
  TFORMER_NOT_NUMBERS = 6, /* NaN or infinite log-probabilities: values overflow, or weights are damaged */
  TFORMER_MISSING = 7,     /* a library, driver or GPU is missing or too old, or C++ cannot split the text (spaCy) */
  TFORMER_CANCELLED = 8,   /* a callback or tformer_cancel stopped the work */
  TFORMER_NO_MEMORY = 9,   /* there is no memory left */
  TFORMER_INTERNAL = 10    /* a fault of this library: please report it */
} tformer_status;

typedef struct tformer_options tformer_options;
typedef struct tformer_model tformer_model;
typedef struct tformer_translator tformer_translator;
typedef struct tformer_serving tformer_serving;
typedef struct tformer_results tformer_results;

/* UTF-8 text; `data` may be null where `size` is 0. */
typedef struct tformer_text {
  const char *data;
  size_t size;
} tformer_text;

/* Token ids. */
typedef struct tformer_ids {
  const int32_t *data;
  size_t size;
} tformer_ids;

/* One output of a line. It belongs to its results. Later versions may add fields at the end. */
typedef struct tformer_output {
  const char *text; /* ends in a zero byte */
  size_t text_size;
  const int32_t *ids; /* target tokens without start and end token */
  size_t ids_size;
  const int32_t *alignment; /* the source token, from 0, that each of `ids` looks at most; null without `align` */
  double score;             /* sum of the tokens' log-probabilities, end token included */
  double value;             /* what a beam is ranked by: the score after penalties */
  int finished;             /* 1: ended by itself; 0: a limit cut it off */
} tformer_output;

/* What a step found: a candidate of a beam, the best token of a greedy search, or what was drawn. */
typedef struct tformer_candidate {
  uint64_t request; /* the line, counted from 0 within the call */
  int32_t row;      /* the row of its line that it continues */
  int32_t token;
  int32_t rank;     /* among the line's candidates, from 0, or the number of the sample */
  double value;     /* sum after the rules, which a beam is ranked by */
  double score;     /* sum of log-probabilities */
} tformer_candidate;

/* Gets what each step found; another value than 0 stops the call with TFORMER_CANCELLED. With several workers it is
 * called from their threads, one at a time. */
typedef int (*tformer_step_callback)(void *user, const tformer_candidate *candidates, size_t count);

/* Gets the next piece of a text; another value than 0 stops the call with TFORMER_CANCELLED. */
typedef int (*tformer_text_callback)(void *user, const char *text, size_t size);

/* The version of the library, such as "0.1.0" (semantic versioning). */
TFORMER_API const char *tformer_version(void);

/* The message of the last call of this thread that failed; valid until its next one. */
TFORMER_API const char *tformer_error(void);

/* Options of a model and of a translator, by their names. Null where there is no memory.
 *
 *   of a model       backend         ort: graphs on ONNX Runtime; native: programs on the library's own engine for
 *                                    processors; trt: plans of TensorRT on a GPU; ort
 *                    variant         graphs to run; without it the bundle's default; fp32: the standard ones; with native
 *                                    a program, without it the first by name; with trt the precision of the plans, without
 *                                    it fp16, bf16 or fp32, what there is
 *                    threads         of one batch; 0: the cores, shared by `workers`
 *                    kernels         of native: an instruction set by name, such as avx2; without it the best there is
 *                    workers         batches that each of its translators decodes at a time; 1
 *                    shortlist       true: score only the tokens that the bundle's lists have for a source
 *                    verify          false: do not compare files with their SHA-256, to start sooner
 *                    onnxruntime     the library's file, or the folder that has it; without it, what the environment
 *                                    variable TFORMER_ONNXRUNTIME names, or what the loader finds
 *                    tensorrt        the same for TensorRT, and TFORMER_TENSORRT
 *   of a translator  batch_tokens    padded source tokens of a batch, per beam; 0 or nothing: 4096, with native 256 to
 *                                    4096 by the sizes of the model
 *                    workers         batches decoded at a time; 1
 *                    max_line_bytes  longer lines are refused; 1048576
 *                    and every decoding option of docs/decoding.md, such as beams or length_penalty
 */
TFORMER_API tformer_options *tformer_options_new(void);
/* Values are written as on the command line: 5, 0.6, true, or 4,9 for lists of token ids. */
TFORMER_API tformer_status tformer_options_set(tformer_options *options, const char *name, const char *value);
TFORMER_API void tformer_options_free(tformer_options *options);

/* Open a bundle's folder. `options` may be null. */
TFORMER_API tformer_status tformer_model_open(const char *folder, const tformer_options *options,
                                              tformer_model **model);
TFORMER_API void tformer_model_close(tformer_model *model);
/* The variant that runs; fp32 for the standard graphs; of plans their precision. Valid as long as the model. */
TFORMER_API const char *tformer_model_variant(const tformer_model *model);
/* Why a model is slower than it could be, as far as its translators have found out; empty: no reason is known. Valid as
 * long as the model. */
TFORMER_API const char *tformer_model_warning(const tformer_model *model);
/* The longest source and output in tokens, end token included. */
TFORMER_API size_t tformer_model_source_tokens(const tformer_model *model);
TFORMER_API size_t tformer_model_target_tokens(const tformer_model *model);
/* The ids that the model sees of a text; they belong to the caller, who frees them with tformer_ids_free. */
TFORMER_API tformer_status tformer_source_ids(const tformer_model *model, tformer_text text, tformer_ids *ids);
/* What the decoder must produce for a text, end token included. */
TFORMER_API tformer_status tformer_target_ids(const tformer_model *model, tformer_text text, tformer_ids *ids);
/* The id of an entry of the target vocabulary, such as a language's code; no text is split. */
TFORMER_API tformer_status tformer_target_entry(const tformer_model *model, tformer_text entry, int32_t *id);
TFORMER_API void tformer_ids_free(tformer_ids *ids);

/* A translator of a model. `options` may be null; those that no request of this model can have are refused here. */
TFORMER_API tformer_status tformer_translator_new(tformer_model *model, const tformer_options *options,
                                                  tformer_translator **translator);
TFORMER_API void tformer_translator_free(tformer_translator *translator);
/* What the bundle's decoding options and those of `options` come to: outputs of a line, whether they are aligned. */
TFORMER_API size_t tformer_translator_n_best(const tformer_translator *translator);
TFORMER_API int tformer_translator_aligns(const tformer_translator *translator);
/* The only outputs that may come from now on; none: any. */
TFORMER_API tformer_status tformer_allow(tformer_translator *translator, const tformer_text *outputs, size_t count);
/* Call back after each step of the calls that begin from now on; null: no more. A callback may cancel the call; another
 * call of its translator fails with TFORMER_USAGE. Where a line's log-probabilities are not numbers, the lines before it
 * in its batch are decoded again, and their steps come twice. */
TFORMER_API void tformer_on_step(tformer_translator *translator, tformer_step_callback callback, void *user);
/* Stop the call that another thread makes, before its next step. A call that begins later is not stopped. */
TFORMER_API void tformer_cancel(tformer_translator *translator);

/* Translate lines. An empty line gives an empty output. `prefixes`: how each output begins, or null. `first`: number of
 * the first line among all, which messages name and draws depend on.
 *
 * Where a line is bad, the status says so and `results` has those of all lines before it. `results` is null only where
 * there is nothing at all. */
TFORMER_API tformer_status tformer_translate(tformer_translator *translator, const tformer_text *lines,
                                             const tformer_text *prefixes, size_t count, uint64_t first,
                                             tformer_results **results);
/* The same for sources given as the ids that the model sees, end token included. */
TFORMER_API tformer_status tformer_generate(tformer_translator *translator, const tformer_ids *sources, size_t count,
                                            uint64_t first, tformer_results **results);
/* Translate one line; `write` gets its text piece by piece as it becomes certain. Needs one output: beams=1, n_best=1.
 * `prefix` may be empty. */
TFORMER_API tformer_status tformer_stream(tformer_translator *translator, tformer_text line, tformer_text prefix,
                                          uint64_t number, tformer_text_callback write, void *user,
                                          tformer_results **results);
/* The log-probability of every token of each target, end token included, given its source. `ids` and `score` of
 * output 0 of each line are the target's and their sum; tformer_results_scores has them one by one. */
TFORMER_API tformer_status tformer_score(tformer_translator *translator, const tformer_text *sources,
                                         const tformer_text *targets, size_t count, uint64_t first,
                                         tformer_results **results);

/* Lines that come one by one and share steps, as a server needs it: each joins those on their way before a step, and
 * leaves when it has ended. What a line gets is what it gets alone, but for the last digits of its scores. On ONNX
 * Runtime in 8 or 4 bits a number can be rounded otherwise, which seldom changes a token: `unstable` in docs/check.md.
 *
 *   tformer_serving_new(model, options, &serving);
 *   tformer_admit(serving, line, prefix, NULL, number);      any thread, at any time
 *   do {                                                     one thread
 *     tformer_step(serving, &left);
 *     while (tformer_take(serving, &number, &results), results) ...
 *   } while (left);
 *
 * All functions but tformer_serving_free may be called from any thread; steps are taken one at a time, and nothing but a
 * step waits for one. Needs a variant of target ort-cpu or native and no shortlist, else the status is TFORMER_LIMIT. */
TFORMER_API tformer_status tformer_serving_new(tformer_model *model, const tformer_options *options,
                                               tformer_serving **serving);
TFORMER_API void tformer_serving_free(tformer_serving *serving);
/* Let a line join before the next step, or a later one where as many are on their way as the bundle's recipe allows.
 * `options`: decoding options of its own, over those of all, or null; any other option is refused. A line has as many rows
 * as the widest that it shares steps with. `number`: what messages name and draws depend on, and what tells this line from
 * the others until it is taken. A line that cannot be translated is refused at once. */
TFORMER_API tformer_status tformer_admit(tformer_serving *serving, tformer_text line, tformer_text prefix,
                                         const tformer_options *options, uint64_t number);
/* The next token of every line on its way. `lines`, if not null: how many are on their way or wait to join. */
TFORMER_API tformer_status tformer_step(tformer_serving *serving, size_t *lines);
/* A line that has ended: its number, and the results of one line. `results` is null where none has. Where something was
 * wrong with the line, the status says so and its results have no lines. */
TFORMER_API tformer_status tformer_take(tformer_serving *serving, uint64_t *number, tformer_results **results);
/* Give up a line: it leaves before the next step, and nothing comes of it. No error if there is none. */
TFORMER_API tformer_status tformer_retire(tformer_serving *serving, uint64_t number);

/* How many lines have results. */
TFORMER_API size_t tformer_results_lines(const tformer_results *results);
/* How many outputs a line has: 1, or up to n_best. */
TFORMER_API size_t tformer_results_outputs(const tformer_results *results, size_t line);
/* An output, best first; null where there is none. */
TFORMER_API const tformer_output *tformer_results_output(const tformer_results *results, size_t line, size_t output);
/* Of tformer_score: as many log-probabilities as output 0 of the line has ids. Null for other results. */
TFORMER_API const double *tformer_results_scores(const tformer_results *results, size_t line);
TFORMER_API void tformer_results_free(tformer_results *results);

#ifdef __cplusplus
}
#endif

#endif
