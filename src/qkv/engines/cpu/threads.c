/* Work in parts, each on a thread of its own. The threads wait for the next work: awake for a moment, because in a step
 * one product follows another, then asleep. Whoever comes while they are at work does his own alone. */

#include "native.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

enum { MOST = 64, AWAKE = 1 << 14 }; /* threads; looks at whether there is work, before falling asleep */

static struct {
    pthread_mutex_t owned, asleep;
    pthread_cond_t wake;
    int count;     /* of threads, the caller among them */
    int parts;     /* of the work */
    pid_t process; /* that they live in: a fork has none */
    atomic_int round, left, sleepers;
    Work *work;
    void *data;
    int64_t size;
} pool = {.owned = PTHREAD_MUTEX_INITIALIZER, .asleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

INLINE void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void do_part(int number) {
    int64_t first = pool.size * number / pool.parts, end = pool.size * (number + 1) / pool.parts;
    if (number < pool.parts && first < end) pool.work(pool.data, first, end, number);
}

static void *live(void *number) {
    int seen = 0;
    for (;;) {
        for (int i = 0; i < AWAKE && atomic_load(&pool.round) == seen; i++) rest();
        if (atomic_load(&pool.round) == seen) {
            pthread_mutex_lock(&pool.asleep);
            atomic_fetch_add(&pool.sleepers, 1);
            while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.wake, &pool.asleep);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.asleep);
        }
        seen++; /* the next round comes only when all have done their part of this one */
        do_part((int)(intptr_t)number);
        atomic_fetch_sub(&pool.left, 1);
    }
    return NULL;
}

/* As many threads as are wanted the first time; whether there are several. */
static int gather(int threads) {
    if (pool.process != getpid()) {
        pool.process = getpid(), pool.count = 0;
        pool.asleep = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER, pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
        atomic_store(&pool.round, 0), atomic_store(&pool.sleepers, 0);
    }
    if (!pool.count) {
        pool.count = 1;
        for (int number = 1; number < threads && number < MOST; number++) {
            pthread_t thread;
            if (pthread_create(&thread, NULL, live, (void *)(intptr_t)number)) break;
            pthread_detach(thread);
            pool.count++;
        }
    }
    return pool.count > 1;
}

void in_parallel(int64_t threads, int64_t size, Work *work, void *data) {
    if (size < 1) return;
    if (threads < 2 || size < 2 || pthread_mutex_trylock(&pool.owned)) {
        work(data, 0, size, 0);
        return;
    }
    if (gather((int)threads)) {
        pool.work = work, pool.data = data, pool.size = size;
        pool.parts = threads < pool.count ? (int)threads : pool.count;
        atomic_store(&pool.left, pool.count - 1);
        atomic_fetch_add(&pool.round, 1);
        if (atomic_load(&pool.sleepers)) {
            pthread_mutex_lock(&pool.asleep);
            pthread_cond_broadcast(&pool.wake);
            pthread_mutex_unlock(&pool.asleep);
        }
        do_part(0);
        for (int i = 0; atomic_load(&pool.left); i++) i < AWAKE ? rest() : (void)sched_yield();
    } else {
        work(data, 0, size, 0);
    }
    pthread_mutex_unlock(&pool.owned);
}
