/* Work in units, on the threads of the OpenMP runtime that the caller names. */

#pragma once
#include <stddef.h>

typedef void (*omp_parallel)(void (*work)(void *), void *about, unsigned threads, unsigned flags);

/* Calls UNIT with ABOUT and every number below UNITS. PARALLEL: GOMP_parallel, or NULL. */
__attribute__((visibility("hidden"))) void run_units(void (*unit)(const void *about, size_t number),
                                                     const void *about, size_t units,
                                                     omp_parallel parallel, unsigned threads);
