/* copiers.c: threads that help with large copies: SOFTNPU_COPIERS less the one that has the task. They belong to the process, as
 * a device's engines do to the machine: started by the first large copy, and asleep while there is none. After a job a copier
 * looks for the next one for a while before it sleeps, because waking a thread takes as long as copying half a MiB does, and a
 * program is many tasks. */
#include "copiers.h"
#include "runtime.h"

enum { SPIN_NS = 50 * 1000, SPINS = 32, MODEST = 10 };

typedef struct job {
    void (*work)(void *);
    void *argument;
    unsigned room;                                          /* copiers that may still come */
    atomic_uint inside;                                     /* copiers that have come and not gone */
    struct job *next;
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t come = PTHREAD_COND_INITIALIZER, gone = PTHREAD_COND_INITIALIZER;
static job *jobs;
static atomic_uint rooms;                                   /* of all jobs */
static unsigned started, asleep;

static inline void pause_a_little(void)
{
    for (int i = 0; i < SPINS; i++)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        /* keeps the compiler from removing the loop */
        atomic_signal_fence(memory_order_seq_cst);
#endif
}

static job *enter(void)                                     /* locked */
{
    for (job *at = jobs; at; at = at->next)
        if (at->room) {
            at->room--;
            atomic_fetch_sub(&rooms, 1);
            atomic_fetch_add(&at->inside, 1);
            return at;
        }
    return NULL;
}

static bool is_wanted_soon(void)
{
    for (int64_t end = soft_now_ns() + SPIN_NS; soft_now_ns() < end; pause_a_little())
        /* relaxed: a hint; enter() looks again under the lock */
        if (atomic_load_explicit(&rooms, memory_order_relaxed))
            return true;
    return false;
}

static void *help(void *unused)
{
    (void)unused;
    soft_thread_stand_back(MODEST);                         /* what wants the processor meanwhile is the program itself */
    soft_thread_copies(true);
    pthread_mutex_lock(&lock);
    for (;;) {
        job *mine = enter();
        pthread_mutex_unlock(&lock);
        if (mine)
            mine->work(mine->argument);
        bool again = !mine && is_wanted_soon();
        pthread_mutex_lock(&lock);
        if (mine) {
            if (atomic_fetch_sub(&mine->inside, 1) == 1)
                pthread_cond_broadcast(&gone);              /* `mine` may be gone from here on */
        } else if (!again && !atomic_load(&rooms)) {
            asleep++;
            pthread_cond_wait(&come, &lock);
            asleep--;
        }
    }
    return NULL;
}

static void start_up_to(unsigned wanted)                    /* locked */
{
    pthread_t thread;
    while (started < wanted && !soft_thread_start(&thread, "softnpu-copier", help, NULL)) {
        pthread_detach(thread);
        SOFT_COUNT(threads, -1);                            /* those that are counted end with what they are for */
        started++;
    }
}

static void offer(job *mine)
{
    pthread_mutex_lock(&lock);
    start_up_to(mine->room);
    mine->next = jobs;
    jobs = mine;
    atomic_fetch_add(&rooms, mine->room);
    if (asleep)
        pthread_cond_broadcast(&come);
    pthread_mutex_unlock(&lock);
}

static void withdraw(job *mine)                             /* locked */
{
    job **at = &jobs;
    while (*at != mine)
        at = &(*at)->next;
    *at = mine->next;
    atomic_fetch_sub(&rooms, mine->room);
}

/* The last pieces are short: looking is faster than sleeping. */
static void wait_for_all(job *mine)
{
    for (int64_t end = soft_now_ns() + SPIN_NS; atomic_load(&mine->inside) && soft_now_ns() < end;)
        pause_a_little();
    pthread_mutex_lock(&lock);                              /* also until the last one has left the lock */
    while (atomic_load(&mine->inside))
        pthread_cond_wait(&gone, &lock);
    pthread_mutex_unlock(&lock);
}

void soft_copiers_run(void (*work)(void *), void *argument, unsigned helpers)
{
    unsigned most = (unsigned)soft_setting.copiers - 1;
    job mine = { .work = work, .argument = argument, .room = helpers < most ? helpers : most };
    if (!mine.room) {
        work(argument);
        return;
    }
    offer(&mine);
    work(argument);
    pthread_mutex_lock(&lock);
    withdraw(&mine);
    pthread_mutex_unlock(&lock);
    wait_for_all(&mine);
}
