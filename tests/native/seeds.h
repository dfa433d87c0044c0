// What the checks of this folder are: PROGRAM FIRST_SEED COUNT runs a case for each seed; the exit status is 0 where all are the same, and a case that is not says so.
#pragma once

#include <cstdlib>

inline int all_the_same(char **given, bool (*same)(unsigned)) {
    const unsigned first = static_cast<unsigned>(std::atoi(given[1])), count = static_cast<unsigned>(std::atoi(given[2]));
    bool all = true;
    for (unsigned seed = first; seed < first + count; ++seed) all = same(seed) && all;
    return all ? 0 : 1;
}
