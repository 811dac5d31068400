// npm install koffi
// TFORMER_ONNXRUNTIME=.../libonnxruntime.so.1.31.1 node translate.mjs .../libtformer.so BUNDLE LINE...
import koffi from 'koffi'

const [path, bundle, ...lines] = process.argv.slice(2)
const library = koffi.load(path)
koffi.struct('tformer_text', { data: 'const char *', size: 'size_t' })
const Output = koffi.struct('tformer_output', {
  text: 'const char *', text_size: 'size_t', ids: 'int32_t *', ids_size: 'size_t', alignment: 'int32_t *',
  score: 'double', value: 'double', finished: 'int'
})

const api = {}
for (const line of [
  'const char *tformer_error()',
  'void *tformer_options_new()',
  'int tformer_options_set(void *options, const char *name, const char *value)',
  'void tformer_options_free(void *options)',
  'int tformer_model_open(const char *folder, void *options, _Out_ void **model)',
  'void tformer_model_close(void *model)',
  'int tformer_translator_new(void *model, void *options, _Out_ void **translator)',
  'void tformer_translator_free(void *translator)',
  'int tformer_translate(void *translator, const tformer_text *lines, void *prefixes, size_t count, uint64_t first, ' +
    '_Out_ void **results)',
  'const tformer_output *tformer_results_output(void *results, size_t line, size_t output)',
  'void tformer_results_free(void *results)'
]) api[line.match(/tformer_(\w+)\(/)[1]] = library.func(line)

// Call a function that may fail, with a place for its result as the last argument.
function made(call, ...given) {
  const place = [null]
  if (call(...given, place)) throw new Error(api.error())
  return place[0]
}

const options = api.options_new()
let model, translator, results
try {
  if (api.options_set(options, 'beams', '4')) throw new Error(api.error())
  model = made(api.model_open, bundle, options)
  translator = made(api.translator_new, model, options)
  const texts = lines.map((data) => ({ data, size: Buffer.byteLength(data) }))
  results = made(api.translate, translator, texts, null, texts.length, 0)
  for (let line = 0; line < texts.length; line++) {
    const found = koffi.decode(api.results_output(results, line, 0), Output)
    console.log(`${found.score.toFixed(4)}\t${found.text}`)
  }
} catch (error) {
  console.error(error.message)
  process.exitCode = 1
} finally {
  if (results) api.results_free(results)
  if (translator) api.translator_free(translator)
  if (model) api.model_close(model)
  api.options_free(options)
}
