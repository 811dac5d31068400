// Groups requests of similar length into batches, and runs work on several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "decode/decode.hpp"

namespace tformer {

/// Batches of request indices, longest requests first; empty requests are left out. A batch has at most
/// `most(longest length)` requests and `batch_tokens` padded tokens.
std::vector<std::vector<std::size_t>> length_batches(const std::vector<std::size_t>& lengths, std::size_t batch_tokens,
                                                     const std::function<std::size_t(std::size_t)>& most);

/// Sources to decode together, padded on the right.
Batch make_batch(const std::vector<std::vector<std::int32_t>>& sources, const std::vector<std::size_t>& indices,
                 std::int32_t pad_id, std::int64_t first);

/// Call `work(worker, item)` for items 0 to `count` - 1 on `workers` threads. After an exception no other item begins.
/// When all running ones have ended, the exception of the first item that failed is rethrown.
void side_by_side(std::size_t count, std::size_t workers, const std::function<void(std::size_t, std::size_t)>& work);

}  // namespace tformer
