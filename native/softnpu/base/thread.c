/* thread.c: how softnpu's own threads are made: deaf to signals, named, counted, and with turns of a tenth of a millisecond,
 * which Linux 6.12 and later grant: so a thread of the program that wakes does not wait 3 ms for one that copies. */
#include "runtime.h"
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { TURN_NS = 100 * 1000 };

typedef struct start {
    void *(*run)(void *);
    void *argument;
    char name[16];
} start;

void soft_thread_turns(int nice)
{
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; } wish = {
        .size = 48, .policy = SCHED_OTHER, .nice = nice, .runtime = TURN_NS };
    if (syscall(SYS_sched_setattr, 0, &wish, 0) && nice)
        setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), nice);
}

static void *begin(void *argument)
{
    start how = *(start *)argument;
    free(argument);
    pthread_setname_np(pthread_self(), how.name);
    soft_thread_turns(getpriority(PRIO_PROCESS, 0));        /* of this thread, as it inherited it */
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
