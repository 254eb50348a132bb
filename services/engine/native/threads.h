/* Divides loops among the pool of threads that torch has: a second pool would fight with it for the processors.
 *
 * Torch has loaded libgomp, whose symbols are found when a library of kernels is loaded; that is also why nothing is
 * linked. Its entry is called by name instead of by pragmas, for which Clang would call another runtime: so any
 * compiler will do. */
#pragma once

void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags);

static inline void run_on_threads(void (*run)(void *), void *data, int threads) {
    if (threads > 1) GOMP_parallel(run, data, (unsigned)threads, 0);
    else run(data);
}

/* Does the work with the numbers `from` ... `to` - 1 of a loop. */
typedef void (*Work)(const void *job, long from, long to);

typedef struct {
    Work work;
    const void *job;
    long count, chunk, taken;
} Loop;

static void run_loop(void *data) {
    Loop *loop = data;
    for (;;) {
        long from = __atomic_fetch_add(&loop->taken, loop->chunk, __ATOMIC_RELAXED);
        if (from >= loop->count) return;
        loop->work(loop->job, from, loop->count - from < loop->chunk ? loop->count : from + loop->chunk);
    }
}

/* Runs a loop of `count` numbers; threads take `chunk` of them at a time. */
static inline void share(Work work, const void *job, long count, long chunk, int threads) {
    Loop loop = {work, job, count, chunk, 0};
    if (count > chunk) run_on_threads(run_loop, &loop, threads);
    else if (count > 0) work(job, 0, count);
}

/* Runs a loop of equal items, in as many parts as there are threads; on one thread if the whole is too little. */
static inline void share_evenly(Work work, const void *job, long count, int threads, int enough) {
    share(work, job, count, enough ? (count + threads - 1) / threads : count, threads);
}
