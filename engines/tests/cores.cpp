// cores ROOT: what the quotas under ROOT are worth; tests/test_machine.py compares with Python's.
#include "cores.hpp"

#include <cstdio>

int main(int, char** words) { std::printf("%d\n", tformer::quota(words[1])); }
