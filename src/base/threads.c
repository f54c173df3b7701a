/* Threads. Owns the pool (or the host's hook) and the floating-point environment around each task.
 * Never decides what a task computes: callers split work so that no result depends on the split. */
#include "base/threads.h"

#include <pthread.h>
#include <pthreadpool.h>
#include <sched.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/fpenv.h"
#include "base/status.h"

/* Multiply-adds that one more thread is worth waking for. */
#define WORK_OF_A_THREAD 2.5e5

#if defined(__SANITIZE_THREAD__)
#define THREADS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREADS_TSAN 1
#endif
#endif

/* The pool's library is not instrumented, so its hand-over is invisible to ThreadSanitizer. */
#if defined(THREADS_TSAN)
void __tsan_acquire(void *addr);
void __tsan_release(void *addr);
#define HAND_OVER(addr) __tsan_release(addr)
#define TAKE_OVER(addr) __tsan_acquire(addr)
#else
#define HAND_OVER(addr) ((void)(addr))
#define TAKE_OVER(addr) ((void)(addr))
#endif

#define MAX_THREADS 1024u
/* Workers beyond so many are not started: tasks are taken by whoever is free, so none needs a worker of its
 * own, and hundreds on a few processors spend seconds to begin, to wake up and to end. */
#define MOST_WORKERS(available) ((available) < 4 ? 16u : 4 * (available))

struct dspark__threads {
    dspark_allocator allocator;
    dspark_parallel host; /* run == NULL: own pool */
    pthreadpool_t pool;   /* NULL for one thread or a host hook */
    uint32_t count; /* in how many parts work is cut at most */
    uint32_t flags;
};

/* One dispatch, on the caller's stack. */
typedef struct dispatch {
    void (*task)(void *arg, size_t i);
    void *arg;
    uint64_t done; /* only its address is used: a second hand-over point for ThreadSanitizer */
} dispatch;

uint32_t dspark__threads_available(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return (uint32_t)CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN); /* more processors than cpu_set_t has bits */
    return n > 0 ? (uint32_t)n : 1u;
}

static void *wait_at_gate(void *arg)
{
    pthread_mutex_lock(arg);
    pthread_mutex_unlock(arg);
    return NULL;
}

/* Can `n` further threads exist at once? The pool's library does not look at pthread_create's
 * result and would wait forever for a thread that never started. */
static int threads_possible(uint32_t n)
{
    pthread_t threads[MAX_THREADS];
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    uint32_t started = 0;

    pthread_mutex_lock(&gate);
    while (started < n && pthread_create(&threads[started], NULL, wait_at_gate, &gate) == 0)
        started++;
    pthread_mutex_unlock(&gate);
    for (uint32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&gate);
    return started == n;
}

static void do_nothing(void *arg, size_t i)
{
    (void)arg;
    (void)i;
}

dspark_status dspark__threads_create(dspark__threads **out, uint32_t n_threads,
                                     const dspark_parallel *host, const dspark_allocator *allocator,
                                     dspark_error *err)
{
    dspark_status st = DSPARK_OK;
    dspark__threads *t = NULL;

    *out = NULL;
    uint32_t available = dspark__threads_available();
    if (n_threads == 0) n_threads = available < MAX_THREADS ? available : MAX_THREADS;
    if (n_threads > MAX_THREADS)
        return dspark__fail(err, DSPARK_EINVAL, "n_threads", "%u threads asked for, at most %u",
                            n_threads, MAX_THREADS);

    t = dspark__alloc(allocator, sizeof *t, 64);
    if (!t) return dspark__fail_nomem(err, "the thread pool", sizeof *t);
    *t =
        (dspark__threads){.allocator = dspark__allocator_or_default(allocator), .count = n_threads};
    /* Workers that spin between steps are fast with a processor each and ruinous without. */
    t->flags = n_threads > available ? PTHREADPOOL_FLAG_YIELD_WORKERS : 0;
    if (host && host->run) {
        t->host = *host;
    } else if (n_threads > 1) {
        const uint32_t most = MOST_WORKERS(available), workers = n_threads < most ? n_threads : most;
        if (!threads_possible(workers - 1)) {
            st = dspark__fail(err, DSPARK_ENOMEM, "n_threads",
                              "the system does not allow %u more threads", workers - 1);
            goto fail;
        }
        t->pool = pthreadpool_create(workers);
        if (!t->pool) {
            st = dspark__fail(err, DSPARK_ENOMEM, "n_threads",
                              "out of memory: a pool of %u threads", workers);
            goto fail;
        }
        /* New workers spin for the first command: of many on few processors that is seconds. */
        if (t->flags) dspark__threads_run(t, do_nothing, NULL, workers);
    }
    *out = t;
    return DSPARK_OK;
fail:
    dspark__threads_free(t);
    return st;
}

void dspark__threads_free(dspark__threads *t)
{
    if (!t) return;
    if (t->pool) pthreadpool_destroy(t->pool);
    dspark_allocator allocator = t->allocator;
    dspark__free(&allocator, t, sizeof *t);
}

uint32_t dspark__threads_count(const dspark__threads *t)
{
    return t->count;
}

size_t dspark__threads_worth(const dspark__threads *t, size_t n_units, double work)
{
    size_t n = t->count;
    if (n > n_units) n = n_units;
    if ((double)n > 1 + work / WORK_OF_A_THREAD) n = 1 + (size_t)(work / WORK_OF_A_THREAD);
    return n;
}

static void run_one(void *context, size_t i)
{
    dispatch *d = context;
    TAKE_OVER(d);
    unsigned old = dspark__fpenv_enter();
    d->task(d->arg, i);
    dspark__fpenv_leave(old);
    HAND_OVER(&d->done);
}

void dspark__threads_run(dspark__threads *t, void (*task)(void *arg, size_t i), void *arg, size_t n)
{
    dispatch d = {task, arg, 0};

    HAND_OVER(&d);
    if (n > 1 && t->host.run) {
        t->host.run(t->host.user, run_one, &d, n);
    } else if (n > 1 && t->pool) {
        pthreadpool_parallelize_1d(t->pool, run_one, &d, n, t->flags);
    } else {
        for (size_t i = 0; i < n; i++) run_one(&d, i);
    }
    TAKE_OVER(&d.done);
}
