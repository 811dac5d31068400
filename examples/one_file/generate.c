/* Generates with ONNX Runtime alone from what `tformer export RUN --layout one-file --out FOLDER` writes.
   cc generate.c -I ONNXRUNTIME/include -L ONNXRUNTIME/lib -lonnxruntime -o generate
   generate FOLDER/generate.onnx BEAMS ID... prints the best output's ids. The source's ids include its end token. */
#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>

#define OUTPUTS 2
static const OrtApi* api;

static void check(OrtStatus* status) {
  if (!status) return;
  fprintf(stderr, "%s\n", api->GetErrorMessage(status));
  exit(1);
}

int main(int count, char** arguments) {
  if (count < 4) return fprintf(stderr, "usage: generate FILE BEAMS ID...\n"), 1;
  api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  OrtEnv* env;
  OrtSessionOptions* options;
  OrtSession* session;
  OrtMemoryInfo* memory;
  check(api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "generate", &env));
  check(api->CreateSessionOptions(&options));
  check(api->CreateSession(env, arguments[1], options, &session));
  check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));

  int32_t size = count - 3, *ids = malloc(size * sizeof *ids);
  for (int32_t i = 0; i < size; ++i) ids[i] = atoi(arguments[i + 3]);
  int32_t beams = atoi(arguments[2]), one = 1, most = 256, none = 0, no_token = -1;
  double length_penalty = 1;
  float repetition_penalty = 1;
  const struct { const char* name; void* data; int64_t shape[2]; int axes; ONNXTensorElementDataType type; } inputs[] = {
      {"src_ids", ids, {1, size}, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"src_lengths", &size, {1}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"beams", &beams, {1}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"n_best", &one, {1}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"max_tokens", &most, {1}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"min_tokens", &none, {1}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"length_penalty", &length_penalty, {1}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
      {"repetition_penalty", &repetition_penalty, {1}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
      {"no_repeat_ngram", &none, {1}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"suppress", &no_token, {1}, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"bad_words", &no_token, {1, 1}, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
      {"first_ids", &no_token, {1, 1}, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}};
  enum { INPUTS = sizeof inputs / sizeof *inputs };
  const char *names[INPUTS], *wanted[OUTPUTS] = {"ids", "lengths"};
  OrtValue *values[INPUTS], *found[OUTPUTS] = {0};
  for (int i = 0; i < INPUTS; ++i) {
    size_t bytes = inputs[i].type == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE ? 8 : 4;
    for (int axis = 0; axis < inputs[i].axes; ++axis) bytes *= inputs[i].shape[axis];
    names[i] = inputs[i].name;
    check(api->CreateTensorWithDataAsOrtValue(memory, inputs[i].data, bytes, inputs[i].shape, inputs[i].axes,
                                              inputs[i].type, &values[i]));
  }
  check(api->Run(session, NULL, names, (const OrtValue* const*)values, INPUTS, wanted, OUTPUTS, found));
  int32_t *output, *length;
  check(api->GetTensorMutableData(found[0], (void**)&output));
  check(api->GetTensorMutableData(found[1], (void**)&length));
  for (int32_t i = 0; i < *length; ++i) printf("%d%c", output[i], i + 1 < *length ? ' ' : '\n');
  return 0;
}
