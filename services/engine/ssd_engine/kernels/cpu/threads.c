#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>

struct work {
    void (*unit)(const void *about, size_t number);
    const void *about;
    size_t units;
    atomic_size_t next;
};

/* The threads of the parent do not live in a forked child, and its OpenMP would wait for them. */
static int is_forked = 0;
static void note_fork(void) { is_forked = 1; }
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, note_fork);
}

static void take_units(void *about) {
    struct work *work = about;
    for (size_t i; (i = atomic_fetch_add(&work->next, 1)) < work->units;)
        work->unit(work->about, i);
}

void run_units(void (*unit)(const void *about, size_t number), const void *about, size_t units,
               omp_parallel parallel, unsigned threads) {
    struct work work = {.unit = unit, .about = about, .units = units};
    atomic_store(&work.next, 0);
    if (threads > units) threads = (unsigned)units;
    if (parallel == NULL || threads <= 1 || is_forked)
        take_units(&work);
    else
        parallel(take_units, &work, threads, 0);
}
