/* cc minimal.c -ltformer, then: TFORMER_ONNXRUNTIME=.../libonnxruntime.so.1.31.1 ./a.out BUNDLE LINE */
#include <stdio.h>
#include <string.h>
#include <tformer/tformer.h>

int main(int count, char **arguments) {
  tformer_model *model = NULL;
  tformer_translator *translator = NULL;
  tformer_results *results = NULL;
  tformer_text line;
  int failed = 1;
  if (count != 3) {
    fprintf(stderr, "usage: minimal BUNDLE LINE\n");
    return 2;
  }
  line.data = arguments[2];
  line.size = strlen(arguments[2]);
  if (tformer_model_open(arguments[1], NULL, &model) || tformer_translator_new(model, NULL, &translator) ||
      tformer_translate(translator, &line, NULL, 1, 0, &results)) {
    fprintf(stderr, "%s\n", tformer_error());
  } else {
    printf("%s\n", tformer_results_output(results, 0, 0)->text);
    failed = 0;
  }
  tformer_results_free(results);
  tformer_translator_free(translator);
  tformer_model_close(model);
  return failed;
}
