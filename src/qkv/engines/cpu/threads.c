/* Thread pool that splits one task into parts. Workers spin for a moment after a task, because the products of a step
 * follow each other closely, and then sleep. A caller that finds the pool in use runs its task on its own thread. */

#include "native.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

enum { MAX_THREADS = 64, SPIN_COUNT = 1 << 14 }; /* threads; polls for a task before a worker sleeps */

static struct {
    pthread_mutex_t in_use, sleep_lock;
    pthread_cond_t wake;
    int count;     /* threads, including the caller */
    int parts;     /* parts of the task */
    pid_t process; /* process that started the threads: a forked child has none */
    atomic_int round, pending, sleepers;
    Task *task;
    void *data;
    int64_t size;
} pool = {
    .in_use = PTHREAD_MUTEX_INITIALIZER,
    .sleep_lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

INLINE void spin_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void run_part(int number) {
    int64_t first = pool.size * number / pool.parts, end = pool.size * (number + 1) / pool.parts;
    if (number < pool.parts && first < end) pool.task(pool.data, first, end, number);
}

static void *worker_loop(void *number) {
    int last_round = 0;
    for (;;) {
        for (int i = 0; i < SPIN_COUNT && atomic_load(&pool.round) == last_round; i++) spin_pause();
        if (atomic_load(&pool.round) == last_round) {
            pthread_mutex_lock(&pool.sleep_lock);
            atomic_fetch_add(&pool.sleepers, 1);
            while (atomic_load(&pool.round) == last_round) pthread_cond_wait(&pool.wake, &pool.sleep_lock);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.sleep_lock);
        }
        last_round++; /* the next round starts only after all workers have finished this one */
        run_part((int)(intptr_t)number);
        atomic_fetch_sub(&pool.pending, 1);
    }
    return NULL;
}

/* Start `threads` - 1 workers on the first call in this process. Return whether there is at least one worker. */
static int start_workers(int threads) {
    if (pool.process != getpid()) {
        pool.process = getpid(), pool.count = 0;
        pool.sleep_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
        atomic_store(&pool.round, 0), atomic_store(&pool.sleepers, 0);
    }
    if (!pool.count) {
        pool.count = 1;
        for (int number = 1; number < threads && number < MAX_THREADS; number++) {
            pthread_t thread;
            if (pthread_create(&thread, NULL, worker_loop, (void *)(intptr_t)number)) break;
            pthread_detach(thread);
            pool.count++;
        }
    }
    return pool.count > 1;
}

void in_parallel(int64_t threads, int64_t size, Task *task, void *data) {
    if (size < 1) return;
    if (threads < 2 || size < 2 || pthread_mutex_trylock(&pool.in_use)) {
        task(data, 0, size, 0);
        return;
    }
    if (start_workers((int)threads)) {
        pool.task = task, pool.data = data, pool.size = size;
        pool.parts = threads < pool.count ? (int)threads : pool.count;
        atomic_store(&pool.pending, pool.count - 1);
        atomic_fetch_add(&pool.round, 1);
        if (atomic_load(&pool.sleepers)) {
            pthread_mutex_lock(&pool.sleep_lock);
            pthread_cond_broadcast(&pool.wake);
            pthread_mutex_unlock(&pool.sleep_lock);
        }
        run_part(0);
        for (int i = 0; atomic_load(&pool.pending); i++) i < SPIN_COUNT ? spin_pause() : (void)sched_yield();
    } else {
        task(data, 0, size, 0);
    }
    pthread_mutex_unlock(&pool.in_use);
}
