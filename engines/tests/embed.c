/* What a program in C does with a bundle that is no folder: embed FOLDER BACKEND VARIANT LINE reads the folder's files by
 * itself, and says what it gets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tformer/tformer.h>

typedef struct Files {
  const char *folder;
  int reads, releases, closes;
} Files;

typedef struct Growing {
  const tformer_model *model;
  int32_t ids[1024];
  size_t count, shown;
} Growing;

static void need(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "%s: %s\n", what, tformer_error());
  exit(1);
}

static tformer_status read_file(void *user, const char *name, tformer_content *content) {
  Files *files = user;
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", files->folder, name);
  FILE *file = fopen(path, "rb");
  if (!file) return TFORMER_MISSING;
  fseek(file, 0, SEEK_END);
  content->size = (size_t)ftell(file);
  rewind(file);
  content->handle = malloc(content->size + 1);
  content->data = content->handle;
  const size_t found = content->handle ? fread(content->handle, 1, content->size, file) : 0;
  fclose(file);
  ++files->reads;
  if (content->handle && found == content->size) return TFORMER_OK;
  free(content->handle);
  return content->handle ? TFORMER_INTERNAL : TFORMER_NO_MEMORY;
}

static void release_file(void *user, const tformer_content *content) {
  ++((Files *)user)->releases;
  free(content->handle);
}

static void close_files(void *user) { ++((Files *)user)->closes; }

static void log_line(void *user, tformer_level level, const char *message) {
  ++*(int *)user;
  printf("log %d %s\n", (int)level, message);
  tformer_cores(); /* the library may be called from here */
  tformer_bundle_option(NULL, 0);
}

static void forget(void *user) { *(int *)user = -1; }

/* Show what the text of a greedy output has gained. */
static int show(void *user, const tformer_candidate *candidates, size_t count) {
  Growing *own = user;
  tformer_text text;
  const tformer_ids ids = {own->ids, own->count + 1};
  if (!count || own->count == 1023) return 0;
  own->ids[own->count++] = candidates[0].token;
  need(tformer_target_text(own->model, ids, 0, &text) == TFORMER_OK, "text");
  if (text.size > own->shown) printf("piece %s\n", text.data + own->shown);
  own->shown = text.size;
  tformer_text_free(&text);
  return 0;
}

static void list(const tformer_files *files) {
  tformer_bundle *bundle;
  need(tformer_bundle_open(files, &bundle) == TFORMER_OK, "bundle");
  const tformer_variant *variant;
  for (size_t i = 0; (variant = tformer_bundle_variant(bundle, i)); ++i) {
    printf("variant %s %s %s %zu %zu %zu %d %d %d\n", variant->name, variant->backend, variant->precision,
           variant->source_tokens, variant->target_tokens, variant->beams, variant->is_default, variant->attention,
           variant->shortlist);
  }
  const tformer_option *option;
  for (size_t i = 0; (option = tformer_bundle_option(bundle, i)); ++i) {
    printf("option %s|%s|%s|%s|%s|%.17g|%.17g\n", option->name, option->type, option->value, option->values, option->help,
           option->least, option->most);
  }
  tformer_bundle_close(bundle);
}

int main(int count, char **arguments) {
  if (count != 5) return 2;
  printf("version %d.%d.%d %s %s\n", TFORMER_VERSION_MAJOR, TFORMER_VERSION_MINOR, TFORMER_VERSION_PATCH, TFORMER_VERSION,
         tformer_version());
  Files own = {arguments[1], 0, 0, 0};
  const tformer_files files = {"embedded", read_file, release_file, close_files, &own};
  int logged = 0;
  need(tformer_on_log(log_line, &logged, forget) == TFORMER_OK, "log");
  list(&files);
  printf("listed: read %d, released %d, closed %d\n", own.reads, own.releases, own.closes);
  own.closes = own.reads = own.releases = 0;

  tformer_options *options = tformer_options_new();
  need(tformer_options_set(options, "backend", arguments[2]) == TFORMER_OK, "backend");
  need(tformer_options_set(options, "variant", arguments[3]) == TFORMER_OK, "variant");
  tformer_model *model;
  need(tformer_model_open_files(&files, options, &model) == TFORMER_OK, "open");
  tformer_options_free(options);
  need(logged > 0, "nothing was logged");
  need(tformer_on_log(NULL, NULL, NULL) == TFORMER_OK, "log");
  need(logged == -1, "the log's callback is not released");

  tformer_translator *translator;
  need(tformer_translator_new(model, NULL, &translator) == TFORMER_OK, "translator");
  Growing growing = {model, {0}, 0, 0};
  tformer_on_step(translator, show, &growing);
  const tformer_text line = {arguments[4], strlen(arguments[4])};
  tformer_results *results;
  need(tformer_translate(translator, &line, NULL, 1, 0, &results) == TFORMER_OK, "translate");
  const tformer_output *output = tformer_results_output(results, 0, 0);
  const tformer_ids ids = {output->ids, output->ids_size};
  tformer_text text;
  need(tformer_target_text(model, ids, 1, &text) == TFORMER_OK, "text");
  printf("piece %s\n", text.data + growing.shown);
  printf("text %s\noutput %s\n", text.data, output->text);
  tformer_text_free(&text);
  tformer_results_free(results);
  tformer_model_close(model);
  need(own.closes == 0, "files are closed before the last translator");
  tformer_translator_free(translator);
  printf("opened: read %d, released %d, closed %d\n", own.reads, own.releases, own.closes);
  return 0;
}
