/* thread.c: how softnpu's own threads are made: deaf to signals, named, counted. */
#include "runtime.h"
#include <signal.h>
#include <stdlib.h>

typedef struct start {
    void *(*run)(void *);
    void *argument;
    char name[16];
} start;

static void *begin(void *argument)
{
    start how = *(start *)argument;
    free(argument);
    pthread_setname_np(pthread_self(), how.name);
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
