/* A process that cannot have another thread. */
#include "ring_kit.h"
#include <dlfcn.h>
#include <errno.h>

static atomic_bool no_threads;

/* Found before the C library's: the ring's own calls come here. */
__attribute__((visibility("default")))
int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
    typedef int create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (atomic_load(&no_threads))
        return EAGAIN;
    return ((create *)dlsym(RTLD_NEXT, "pthread_create"))(thread, attr, run, arg);
}

TEST(test_program_for_the_worker_is_refused_without_a_thread_and_taken_when_there_is_one)
{
    fake_reset();
    ring *r = open_ring(1, 1000, 0, 1000);
    script s = { 0 };
    script_copy(&s, 1, 2, 10);
    atomic_store(&no_threads, true);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_NO_THREAD);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_NO_THREAD);    /* and not RING_FULL: nothing was kept */
    atomic_store(&no_threads, false);
    CHECK_EQ(submit(r, 1, &s, PATIENCE_MS), RING_QUEUED);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 20, 2);
    close_ring(r);
}

typedef struct waiting { ring *r; script s; ring_completion ran; int status; } waiting;

static void *submit_it(void *arg)
{
    waiting *w = arg;
    fake_context = HOME;
    w->status = ring_submit(w->r, 1, w->s.steps, w->s.count, PATIENCE_MS, &w->ran);
    return NULL;
}

TEST(test_hand_over_without_a_thread_waits_in_the_call_and_can_be_cancelled)
{
    for (int cancelled = 0; cancelled < 2; cancelled++) {
        waiting w = { 0 };
        pthread_t thread;
        fake_reset();
        fake_hold();
        w.r = open_ring(2, 1000, 1000, 50);
        script_copy(&w.s, 1, 2, 10);
        fake_stop(COPY_ASYNC);
        pthread_create(&thread, NULL, submit_it, &w);
        fake_reached(COPY_ASYNC, 1);
        atomic_store(&no_threads, true);
        fake_go();
        fake_reached(SYNC_STREAM, 1);
        CHECK_EQ(ring_cancel(w.r, 2), 0);                   /* no thread holds the lock meanwhile */
        if (cancelled)
            CHECK_EQ(ring_cancel(w.r, 1), 1);
        else
            fake_let_all();
        pthread_join(thread, NULL);
        CHECK_EQ(w.status, RING_RAN);
        CHECK_DONE(w.ran, 1, cancelled ? RING_CANCELLED : RING_DONE, cancelled ? 0 : 20, 2);
        close_ring(w.r);
        atomic_store(&no_threads, false);
    }
}

int main(void)
{
    RUN(test_program_for_the_worker_is_refused_without_a_thread_and_taken_when_there_is_one);
    RUN(test_hand_over_without_a_thread_waits_in_the_call_and_can_be_cancelled);
    return check_done();
}
