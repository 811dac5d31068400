"""Errors that Python and C++ both raise, mostly for requests beyond a limit; `make spec` writes engines/src/spec.hpp.

A field `{name:d}` is a whole number, `{name}` a text.
"""

TOO_MANY_SENTENCES = "a batch of {sentences:d} sentences exceeds the limit of {limit:d}: send fewer at once"
SOURCE_TOO_LONG = "a source of {tokens:d} tokens exceeds the limit of {limit:d}: split it, or {remedy}"
LONGER_SOURCES = "export a model with a larger src_len axis and max_positions"
WRONG_LENGTHS = "source lengths must be between 1 and the width {width:d} of the ids"
SOURCE_ID = "token id {token:d} is outside the source vocabulary of {size:d}"
TARGET_ID = "token id {token:d} is outside the target vocabulary of {size:d}"
TOO_MANY_BEAMS = "{beams:d} beams exceed the limit of {limit:d}: use fewer, or {remedy}"
LARGER_BEAMS = "export with a larger beams axis (at most half the vocabulary unless top_k is set)"
TOO_MANY_STEPS = "decoding step {step:d} exceeds the limit of {limit:d} target tokens"
TOO_MANY_ROWS = "{rows:d} {kind} exceed the engine's limit of {limit:d}: use fewer, or {remedy}"
MORE_ROWS = "export with a larger beams axis"
BEYOND_PLANS = "{option} {value:d} exceeds the plans' largest, {limit:d}: use less, or {remedy}"
NO_ATTENTION = (
    "this variant does not return attention: export with a recipe that has attention = true, such as fp32-attention"
)
NO_MEMORY_GRAPH = "this variant cannot run the encoder alone: export it again with --memory"
CANNOT_JOIN = (
    "this engine cannot add sentences to a running batch: use a variant of target {targets}, without a shortlist"
)
TOO_MANY_JOINED = "{sentences:d} sentences exceed the limit of {limit:d}: admit fewer"
NOT_FINITE = (
    "NaN or infinite log-probabilities at token {step:d}: values overflow, or the weights contain NaN: tformer check "
    "names the first layer"
)
TOP_K = "top_k={top_k:d} exceeds the vocabulary of {size:d}"
END_IS_FORCED = "a forced token is an end token: leave it out, an output ends by itself"
EMPTY_SOURCE = "the source is empty, so that no target can be scored: leave the line out"
FORCED_END = " and the forced end"
TOO_MANY_FORCED = (
    "{forced:d} forced tokens{also} do not fit into {longest:d}, the most that max_tokens, max_ratio and the model's "
    "positions allow here: force fewer, or raise these"
)
