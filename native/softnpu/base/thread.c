/* thread.c: makes softnpu's own threads: deaf to signals, named, counted, with turns of a chosen length.
 *
 * Linux 6.12 and later let a thread choose the length of its turns. A thread that wakes runs before threads with longer turns; else
 * it waits for the kernel's next tick, every 4 ms on many machines. So a thread starts with short turns. From a large copy to the
 * next small one its turns are longer than those of the program's threads, which have up to 3 ms. Then threads that wake meanwhile
 * run first, and so does this one when it wakes for its next large copy. */
#include "runtime.h"
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SHORT_NS = 100 * 1000, LONG_NS = 6 * 1000 * 1000 };

static _Thread_local struct { bool ours, copies; } self;

typedef struct start {
    void *(*run)(void *);
    void *argument;
    char name[16];
} start;

static void wish(uint64_t turn_ns)                          /* nothing else of the calling thread changes */
{
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; } turns = {
        .size = 48, .policy = SCHED_OTHER, .nice = getpriority(PRIO_PROCESS, 0), .runtime = turn_ns };
    syscall(SYS_sched_setattr, 0, &turns, 0);
}

void soft_thread_copies(bool much)
{
    if (self.ours && self.copies != much) {
        self.copies = much;
        wish(much ? LONG_NS : SHORT_NS);
    }
}

void soft_thread_stand_back(int nice)
{
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), nice);
}

static void *begin(void *argument)
{
    start how = *(start *)argument;
    free(argument);
    pthread_setname_np(pthread_self(), how.name);
    self.ours = true;
    wish(SHORT_NS);
    void *result = how.run(how.argument);
    SOFT_COUNT(threads, -1);
    return result;
}

int soft_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument)
{
    start *how = malloc(sizeof *how);
    if (!how)
        return -1;
    *how = (start){ .run = run, .argument = argument };
    for (size_t i = 0; name[i] && i < sizeof how->name - 1; i++)
        how->name[i] = name[i];
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);              /* inherited: signals belong to the program's threads */
    SOFT_COUNT(threads, 1);
    int failed = pthread_create(thread, NULL, begin, how);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        SOFT_COUNT(threads, -1);
        free(how);
    }
    return failed ? -1 : 0;
}
