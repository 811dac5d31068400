/* libtformer: runs the bundles of tformer-deploy. Text in, translations out, with the same tokens as in Python.
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
 * Threads: one model, many translators. An open model is immutable; any number of threads may make translators of it,
 * and all of them share its weights. A translator is used by one thread at a time; only `tformer_cancel` may be called
 * from another. The caller frees what it got: options, models, translators, results. A model may be closed before its
 * translators: what they share is freed with the last of them. Opening the first model sets ORT_DISABLE_TELEMETRY in
 * the environment; if other threads may read the environment at that time, set it yourself before.
 *
 * Errors: functions that can fail return a status, 0 for success. `tformer_error` then says in one line what is wrong,
 * where, and how to fix it. No function throws or ends the process. A callback must not throw. Do not end a thread that
 * is inside a call, by pthread_exit in a callback or by pthread_cancel: that ends the process.
 *
 * Text is UTF-8, with its size in bytes. What comes back ends in a zero byte as well.
 */
#ifndef TFORMER_H
#define TFORMER_H

#include <stddef.h>
#include <stdint.h>

#include "version.h" /* TFORMER_VERSION_MAJOR, _MINOR and _PATCH, and TFORMER_VERSION, such as "0.1.0" */

#if defined(TFORMER_BUILDING) && defined(_WIN32)
#define TFORMER_API __declspec(dllexport)
#elif defined(TFORMER_BUILDING)
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
  TFORMER_INTERNAL = 10    /* a bug in this library: please report it */
} tformer_status;

typedef struct tformer_options tformer_options;
typedef struct tformer_bundle tformer_bundle;
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
  const int32_t *alignment; /* the source token, from 0, that each of `ids` attends to most; null without `align` */
  double score;             /* sum of the tokens' log-probabilities, end token included */
  double value;             /* what a beam is ranked by: the score after penalties */
  int finished;             /* 1: ended by itself; 0: a limit cut it off */
} tformer_output;

/* A token that a step chose: a candidate of a beam, the best token of a greedy search, or a sample. */
typedef struct tformer_candidate {
  uint64_t request; /* the line, counted from 0 within the call */
  int32_t row;      /* the row of its line that it continues */
  int32_t token;
  int32_t rank;     /* among the line's candidates, from 0, or the number of the sample */
  double value;     /* sum after the rules, which a beam is ranked by */
  double score;     /* sum of log-probabilities */
} tformer_candidate;

/* Called after each step with its candidates; returning anything but 0 stops the call with TFORMER_CANCELLED. With
 * several workers it is called from their threads, one at a time. */
typedef int (*tformer_step_callback)(void *user, const tformer_candidate *candidates, size_t count);

/* Called with the next piece of a text; returning anything but 0 stops the call with TFORMER_CANCELLED. */
typedef int (*tformer_text_callback)(void *user, const char *text, size_t size);

/* The bytes of a file. `handle` is for whoever releases them. */
typedef struct tformer_content {
  const void *data; /* may be null where `size` is 0 */
  size_t size;
  void *handle;
} tformer_content;

/* The files of a bundle, which need not be files: an archive, decrypted bytes, data inside the program. All zeros but
 * for `name`: a folder.
 *
 * Who owns what: the library copies this struct. It uses `user` until it calls `close`, once, when nothing needs the
 * bundle any more: after the last model, translator and serving of it is freed, or before a call that fails returns.
 * Bytes that `read` gave must stay as they are until `release`, which comes before `close`.
 *
 * Threads: calls of `read` come one at a time, from any thread that opens or uses the model; those of `release` and
 * `close` from any thread. None may call functions of the same model, and none may throw. */
typedef struct tformer_files {
  const char *name; /* what messages call the bundle; null: "memory". If `read` is null, its folder */
  /* Give the bytes of the file of this name, which is that of the manifest's `files`, such as manifest.json or
   * native-int8/weights.data. Returns TFORMER_OK; TFORMER_MISSING if there is no such file; TFORMER_NO_MEMORY or
   * TFORMER_CANCELLED, which the call that needs the file returns too; anything else if it cannot be read. Only files
   * that are needed are read: once while a model is opened, and again if a first serving needs another graph (backend
   * ort) or a batch the plans of another profile (trt). */
  tformer_status (*read)(void *user, const char *name, tformer_content *content);
  void (*release)(void *user, const tformer_content *content); /* null: the bytes stay until `close` */
  void (*close)(void *user);                                   /* may be null */
  void *user;
} tformer_files;

/* A set of graphs, or a program, in a bundle. Later versions may add fields at the end. */
typedef struct tformer_variant {
  const char *name;      /* as the option `variant` takes it, but of graphs for plans, where that names a precision */
  const char *backend;   /* what runs it: ort, native or trt */
  const char *precision; /* of the weights: fp32, bf16, int8 or int4 */
  size_t source_tokens;  /* the longest source and output, end token included; of plans see their profiles */
  size_t target_tokens;
  size_t beams;   /* most rows of a line */
  int is_default; /* 1: what backend ort runs if no variant is named */
  int attention;  /* 1: it can align */
  int shortlist;  /* 1: it can be opened with the option `shortlist` */
} tformer_variant;

/* A decoding option. Later versions may add fields at the end. */
typedef struct tformer_option {
  const char *name;
  const char *type;   /* int, float, bool, choice, token ids, or sequences of token ids */
  const char *value;  /* the default, as tformer_options_set takes it */
  const char *values; /* the valid ones in words, or the choices with commas between; empty: any of the type */
  const char *help;
  double least, most; /* numbers that no valid one is outside of; 0 and 0 if it is no number */
} tformer_option;

/* How much a message matters. The numbers are those of Python's module logging. */
typedef enum tformer_level {
  TFORMER_LOG_DEBUG = 10,  /* what calls do: batches of a call, graphs that are opened late */
  TFORMER_LOG_INFO = 20,   /* what opening a model decides: backend, variant, threads, kernels, libraries */
  TFORMER_LOG_WARNING = 30 /* what makes a model slower than it could be */
} tformer_level;

/* Called with a message of one line, which ends in a zero byte. */
typedef void (*tformer_log_callback)(void *user, tformer_level level, const char *message);

/* The version of the library, such as "0.1.0" (semantic versioning); TFORMER_VERSION is that of this header. */
TFORMER_API const char *tformer_version(void);

/* Tell `callback` what the library decides by itself, in the whole process; null: no longer, as at first. Messages come
 * from the thread whose call they are about, several at a time, and never while the library holds a lock. The callback
 * may call any function but those of the translator or serving in whose call it is; it must not throw. `release`, which
 * may be null, is called with `user` when the callback was replaced and its last call has ended. */
TFORMER_API tformer_status tformer_on_log(tformer_log_callback callback, void *user, void (*release)(void *user));

/* The CPUs that this process may use: those of its affinity mask, at most its cgroup's quota. */
TFORMER_API size_t tformer_cores(void);

/* The message of the last call of this thread that failed; valid until its next one. */
TFORMER_API const char *tformer_error(void);

/* New options for models and translators, none set; null if memory is full. Names, values and [defaults]:
 *
 *   of a model       backend         ort: graphs on ONNX Runtime; native: programs on the library's own CPU engine;
 *                                    trt: TensorRT plans on a GPU [ort]
 *                    variant         the graphs to run; fp32: the standard ones [the bundle's default]; with native a
 *                                    program [the first by name]; with trt the precision of the plans [the first
 *                                    of fp16, bf16 and fp32 that there is for this GPU]
 *                    threads         threads per batch; 0: the cores, divided by `workers` [0]
 *                    kernels         with native: an instruction set, such as avx2 [the best of this machine]
 *                    workers         batches that each of its translators decodes at a time [1]
 *                    shortlist       true: score only the tokens that the bundle's shortlist has for a source [false]
 *                    verify          false: do not compare files with their SHA-256, to start sooner [true]
 *                    onnxruntime     ONNX Runtime's file or its folder [what the environment variable
 *                                    TFORMER_ONNXRUNTIME names, else what the loader finds]
 *                    tensorrt        the same for TensorRT, with TFORMER_TENSORRT
 *   of a translator  batch_tokens    padded source tokens per batch and beam; 0: 4096, with native 256 to 4096 by the
 *                                    sizes of the model [0]
 *                    workers         batches decoded at a time [1]
 *                    max_line_bytes  longer lines are an error [1048576]
 *                    and every decoding option of docs/decoding.md, such as beams or length_penalty
 */
TFORMER_API tformer_options *tformer_options_new(void);
/* Values are written as on the command line: 5, 0.6, true, or 4,9 for lists of token ids. */
TFORMER_API tformer_status tformer_options_set(tformer_options *options, const char *name, const char *value);
TFORMER_API void tformer_options_free(tformer_options *options);

/* Read what a bundle says of itself: no model is opened and no library loaded. Of a folder all files must be there, of
 * other files only manifest.json is read. */
TFORMER_API tformer_status tformer_bundle_open(const tformer_files *files, tformer_bundle **bundle);
TFORMER_API void tformer_bundle_close(tformer_bundle *bundle);
/* A variant by its number from 0; null behind the last one. Valid as long as the bundle. */
TFORMER_API const tformer_variant *tformer_bundle_variant(const tformer_bundle *bundle, size_t number);
/* A decoding option by its number from 0, with the bundle's default; null behind the last one. Valid as long as the
 * bundle. `bundle` may be null: defaults are then those of the library, and it is valid for ever. */
TFORMER_API const tformer_option *tformer_bundle_option(const tformer_bundle *bundle, size_t number);

/* Open a bundle's folder. `options` may be null. */
TFORMER_API tformer_status tformer_model_open(const char *folder, const tformer_options *options,
                                              tformer_model **model);
/* Open a bundle that is not a folder. Weights of backend native are used where they lie, if they begin at a multiple of
 * 64, else copied. ONNX Runtime copies what it is given. */
TFORMER_API tformer_status tformer_model_open_files(const tformer_files *files, const tformer_options *options,
                                                    tformer_model **model);
TFORMER_API void tformer_model_close(tformer_model *model);
/* The variant that runs; fp32 for the standard graphs; for plans their precision. Valid as long as the model. */
TFORMER_API const char *tformer_model_variant(const tformer_model *model);
/* Why a model runs slower than it could, if its translators have found a reason; else empty. Valid as long as it. */
TFORMER_API const char *tformer_model_warning(const tformer_model *model);
/* The longest source and output in tokens, end token included. */
TFORMER_API size_t tformer_model_source_tokens(const tformer_model *model);
TFORMER_API size_t tformer_model_target_tokens(const tformer_model *model);
/* The ids that the model sees of a text; they belong to the caller, who frees them with tformer_ids_free. If a call
 * fails, there are none: a null pointer and 0. */
TFORMER_API tformer_status tformer_source_ids(const tformer_model *model, tformer_text text, tformer_ids *ids);
/* The ids that the decoder must produce for a text, end token included. */
TFORMER_API tformer_status tformer_target_ids(const tformer_model *model, tformer_text text, tformer_ids *ids);
/* The id of an entry of the target vocabulary, such as a language code; the text is not tokenized. -1 if a call fails. */
TFORMER_API tformer_status tformer_target_entry(const tformer_model *model, tformer_text entry, int32_t *id);
TFORMER_API void tformer_ids_free(tformer_ids *ids);
/* The text of target ids; ids that do not exist and special ones have none. With `ended` 0 without what further ids may
 * change, such as an incomplete character: the text then begins with that of the first ids alone, so that for a growing
 * output, as from tformer_on_step, what each call adds can be shown at once, and all of it is the text of the whole
 * output with `ended` 1. The text belongs to the caller, who frees it with tformer_text_free; null and 0 if a call fails. */
TFORMER_API tformer_status tformer_target_text(const tformer_model *model, tformer_ids ids, int ended,
                                               tformer_text *text);
TFORMER_API void tformer_text_free(tformer_text *text);

/* A translator of a model. `options` may be null. Fails if the model can never satisfy the options. */
TFORMER_API tformer_status tformer_translator_new(tformer_model *model, const tformer_options *options,
                                                  tformer_translator **translator);
TFORMER_API void tformer_translator_free(tformer_translator *translator);
/* Outputs per line, and whether they have alignments, by the bundle's decoding options and by `options`. */
TFORMER_API size_t tformer_translator_n_best(const tformer_translator *translator);
TFORMER_API int tformer_translator_aligns(const tformer_translator *translator);
/* Allow only these outputs from now on; none: allow any. */
TFORMER_API tformer_status tformer_allow(tformer_translator *translator, const tformer_text *outputs, size_t count);
/* Call `callback` after each step of later calls; null: no longer. A callback may cancel the call; another call of its
 * translator fails with TFORMER_USAGE. If a line has NaN or infinite log-probabilities, the lines before it in its
 * batch are decoded again, so that their steps come twice. */
TFORMER_API void tformer_on_step(tformer_translator *translator, tformer_step_callback callback, void *user);
/* Stop the call that is running in another thread, before its next step. Later calls are not stopped. */
TFORMER_API void tformer_cancel(tformer_translator *translator);

/* Translate lines. An empty line gives an empty output. `prefixes`: how each output begins, or null. `first`: the
 * number of the first line, from 0; it seeds the line's samples. Messages count lines from 1: they call it first + 1.
 *
 * If a line is bad, the status says so, and `results` has the results of all lines before it. `results` is null only if
 * there are none at all. */
TFORMER_API tformer_status tformer_translate(tformer_translator *translator, const tformer_text *lines,
                                             const tformer_text *prefixes, size_t count, uint64_t first,
                                             tformer_results **results);
/* The same for sources given as the ids that the model sees, end token included. */
TFORMER_API tformer_status tformer_generate(tformer_translator *translator, const tformer_ids *sources, size_t count,
                                            uint64_t first, tformer_results **results);
/* Translate one line; `write` gets its text piece by piece as it is produced. Needs beams=1, n_best=1.
 * `prefix` may be empty. `number`: as `first`. */
TFORMER_API tformer_status tformer_stream(tformer_translator *translator, tformer_text line, tformer_text prefix,
                                          uint64_t number, tformer_text_callback write, void *user,
                                          tformer_results **results);
/* The log-probability of every token of each target, end token included, given its source: tformer_results_scores.
 * Output 0 of each line has the target's `ids`, and their sum as `score`.
 *
 * If a line is bad, the status says so, and `results` has the scores of all lines before it. If log-probabilities are NaN
 * or infinite, it may have those of fewer lines. */
TFORMER_API tformer_status tformer_score(tformer_translator *translator, const tformer_text *sources,
                                         const tformer_text *targets, size_t count, uint64_t first,
                                         tformer_results **results);

/* Continuous batching, for servers: lines join the running batch before any step, and leave it when they have ended. A
 * line gets the same output as alone, but for the last digits of its scores. On ONNX Runtime in 8 or 4 bits, values can
 * be rounded differently, which seldom changes a token: `unstable` in docs/check.md.
 *
 *   tformer_serving_new(model, options, &serving);
 *   tformer_admit(serving, line, prefix, NULL, number);      any thread, at any time
 *   do {                                                     one thread
 *     tformer_step(serving, &left);
 *     while (tformer_take(serving, &number, &results), results) ...
 *   } while (left);
 *
 * All functions but tformer_serving_free may be called from any thread; steps run one at a time, and only a step waits
 * for another step. All lines share one batch, whatever `workers` is, with the model's threads per batch: open the model
 * with workers=1, so that these are all cores. Needs a variant of target ort-cpu or native and no shortlist, or plans,
 * else the status is TFORMER_LIMIT. */
TFORMER_API tformer_status tformer_serving_new(tformer_model *model, const tformer_options *options,
                                               tformer_serving **serving);
TFORMER_API void tformer_serving_free(tformer_serving *serving);
/* Let a line join before the next step, or later if the batch has as many lines as the recipe or the plans allow.
 * `options`: its own decoding options, over those of all, or null; other options are an error. Every line of a batch
 * has as many rows as the widest one. `number`: stands in messages as it is, seeds the line's samples, and identifies the
 * line until it is taken. A line that cannot be translated fails at once. */
TFORMER_API tformer_status tformer_admit(tformer_serving *serving, tformer_text line, tformer_text prefix,
                                         const tformer_options *options, uint64_t number);
/* Run one step for all running lines. `lines`, if not null: how many are running or wait to join. */
TFORMER_API tformer_status tformer_step(tformer_serving *serving, size_t *lines);
/* Take a line that has ended: its number, and the results of one line. `results` is null if none has ended. If the line
 * failed, the status says so, and its results have no lines. */
TFORMER_API tformer_status tformer_take(tformer_serving *serving, uint64_t *number, tformer_results **results);
/* Cancel a line: it leaves before the next step, without results. No error if there is no such line. */
TFORMER_API tformer_status tformer_retire(tformer_serving *serving, uint64_t number);

/* How many lines have results. */
TFORMER_API size_t tformer_results_lines(const tformer_results *results);
/* How many outputs a line has: up to n_best. */
TFORMER_API size_t tformer_results_outputs(const tformer_results *results, size_t line);
/* An output, best first; null if there is no such one. */
TFORMER_API const tformer_output *tformer_results_output(const tformer_results *results, size_t line, size_t output);
/* Of tformer_score: a log-probability for each of the ids of output 0 of the line. Null for other results. */
TFORMER_API const double *tformer_results_scores(const tformer_results *results, size_t line);
TFORMER_API void tformer_results_free(tformer_results *results);

#ifdef __cplusplus
}
#endif

#endif
