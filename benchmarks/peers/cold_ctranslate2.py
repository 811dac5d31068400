"""The least script that translates one sentence with CTranslate2: MODEL MAX_TOKENS TOKEN..."""

import sys

import ctranslate2

translator = ctranslate2.Translator(sys.argv[1], "cpu", intra_threads=1)
result = translator.translate_batch([sys.argv[3:]], beam_size=1, max_decoding_length=int(sys.argv[2]))[0]
print(" ".join(result.hypotheses[0]))
