// Any exception as an Error, for those who call the library from outside.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "errors.hpp"

namespace tformer {

/// An exception as an Error: one of the library itself unless the system lacks something. Throws std::bad_alloc.
inline Error described(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {Status::no_memory, "there is no memory left: use smaller batches or fewer workers"};
  } catch (const std::system_error& error) {
    return {Status::no_memory, std::string("the system gives no thread, file or memory: ") + error.what() + ": free some"};
  } catch (const std::exception& error) {
    return {Status::internal, std::string("internal fault: ") + error.what() + ": please report it"};
  } catch (...) {
    return {Status::internal, "internal fault: please report it"};
  }
}

}  // namespace tformer
