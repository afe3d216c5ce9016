/* Host callbacks: which thread runs them, when, and how long they hold the stream. */
#include "gate.h"

static aclrtContext context;
static aclrtStream stream;

typedef struct note { int order[16]; _Atomic int count; pthread_t thread; } note;
typedef struct entry { note *in; int number; } entry;

static void write_down(void *argument)
{
    entry *it = argument;
    it->in->thread = pthread_self();
    it->in->order[it->in->count] = it->number;
    it->in->count++;
}

TEST(test_callbacks_run_inside_process_report_in_stream_order)
{
    note notes = { .count = 0 };
    entry entries[4] = { { &notes, 0 }, { &notes, 1 }, { &notes, 2 }, { &notes, 3 } };
    CHECK_ERR(aclrtProcessReport(1), ACL_ERROR_RT_THREAD_SUBSCRIBE);
    CHECK_ERR(aclrtLaunchCallback(write_down, &entries[0], ACL_CALLBACK_NO_BLOCK, stream), ACL_ERROR_RT_STREAM_NO_CB_REG);
    CHECK_OK(aclrtSubscribeReport((uint64_t)pthread_self(), stream));
    CHECK_ERR(aclrtSubscribeReport((uint64_t)pthread_self(), stream), ACL_ERROR_RT_STREAM_SUBSCRIBE);
    CHECK_ERR(aclrtProcessReport(1), ACL_ERROR_RT_REPORT_TIMEOUT);
    CHECK_ERR(aclrtProcessReport(0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtProcessReport(-2), ACL_ERROR_RT_PARAM_INVALID);
    for (int i = 0; i < 4; i++)
        CHECK_OK(aclrtLaunchCallback(write_down, &entries[i], ACL_CALLBACK_NO_BLOCK, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));               /* non-blocking ones do not hold the stream */
    CHECK_EQ(notes.count, 0);
    CHECK_OK(aclrtProcessReport(-1));
    CHECK_EQ(notes.count, 4);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(notes.order[i], i);
    CHECK(pthread_equal(notes.thread, pthread_self()));
    CHECK_OK(aclrtUnSubscribeReport((uint64_t)pthread_self(), stream));
    CHECK_ERR(aclrtUnSubscribeReport((uint64_t)pthread_self(), stream), ACL_ERROR_RT_STREAM_NO_CB_REG);
    CHECK_ERR(aclrtProcessReport(1), ACL_ERROR_RT_THREAD_SUBSCRIBE);
}

TEST(test_a_blocking_callback_holds_the_stream)
{
    note notes = { .count = 0 };
    entry one = { &notes, 1 };
    _Atomic int after = 0;
    CHECK_OK(aclrtSubscribeReport((uint64_t)pthread_self(), stream));
    CHECK_OK(aclrtLaunchCallback(write_down, &one, ACL_CALLBACK_BLOCK, stream));
    CHECK_OK(aclrtLaunchCallback(set_flag, (void *)&after, ACL_CALLBACK_NO_BLOCK, stream));
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_OK(aclrtProcessReport(-1));
    CHECK_EQ(notes.count, 1);
    CHECK_OK(aclrtSynchronizeStream(stream));
    if (!after)
        CHECK_OK(aclrtProcessReport(-1));
    CHECK_EQ(after, 1);
    CHECK_OK(aclrtUnSubscribeReport((uint64_t)pthread_self(), stream));
}

TEST(test_an_abort_takes_a_callback_back)
{
    _Atomic int ran = 0;
    CHECK_OK(aclrtSubscribeReport((uint64_t)pthread_self(), stream));
    CHECK_OK(aclrtLaunchCallback(set_flag, (void *)&ran, ACL_CALLBACK_BLOCK, stream));
    CHECK_OK(aclrtStreamAbort(stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_ERR(aclrtProcessReport(1), ACL_ERROR_RT_REPORT_TIMEOUT);
    CHECK_EQ(ran, 0);
    CHECK_OK(aclrtUnSubscribeReport((uint64_t)pthread_self(), stream));
}

TEST(test_a_dropped_callback_does_not_hold_the_stream)
{
    _Atomic int ran = 0;
    CHECK_OK(aclrtSubscribeReport((uint64_t)pthread_self(), stream));
    CHECK_EQ(softnpu_fault("aclrtLaunchCallback:drop"), 0);
    CHECK_OK(aclrtLaunchCallback(set_flag, (void *)&ran, ACL_CALLBACK_BLOCK, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_ERR(aclrtProcessReport(1), ACL_ERROR_RT_REPORT_TIMEOUT);
    CHECK_EQ(softnpu_fault("aclrtLaunchHostFunc:drop"), 0);
    CHECK_OK(aclrtLaunchHostFunc(stream, set_flag, (void *)&ran));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(ran, 0);
    CHECK_OK(aclrtUnSubscribeReport((uint64_t)pthread_self(), stream));
}

typedef struct reporter { gate ready; _Atomic int stop; uint64_t id; aclError last; } reporter;

static void *process_reports(void *argument)
{
    reporter *it = argument;
    CHECK_OK(aclrtSetCurrentContext(context));
    it->id = (uint64_t)pthread_self();
    gate_open(&it->ready);
    do {
        it->last = aclrtProcessReport(-1);
        if (it->last == ACL_ERROR_RT_THREAD_SUBSCRIBE && !it->stop)
            sched_yield();                                  /* not subscribed yet */
    } while (!it->stop);
    return NULL;
}

TEST(test_one_thread_serves_several_streams_until_a_sentinel)
{
    reporter it = { .ready = GATE };
    pthread_t thread;
    aclrtStream second = new_stream(), foreign;
    aclrtContext other;
    note notes = { .count = 0 };
    entry entries[2] = { { &notes, 0 }, { &notes, 1 } };
    pthread_create(&thread, NULL, process_reports, &it);
    gate_hold(&it.ready);
    CHECK_OK(aclrtSubscribeReport(it.id, stream));
    CHECK_OK(aclrtSubscribeReport(it.id, second));
    CHECK_ERR(aclrtUnSubscribeReport(it.id + 1, second), ACL_ERROR_RT_THREAD_SUBSCRIBE);
    CHECK_OK(aclrtLaunchCallback(write_down, &entries[0], ACL_CALLBACK_BLOCK, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtLaunchCallback(write_down, &entries[1], ACL_CALLBACK_BLOCK, second));
    CHECK_OK(aclrtSynchronizeStream(second));
    CHECK_EQ(notes.count, 2);
    CHECK(pthread_equal(notes.thread, thread));
    CHECK_OK(aclrtCreateContext(&other, 1));                /* a thread serves one device */
    foreign = new_stream();
    CHECK_ERR(aclrtSubscribeReport(it.id, foreign), ACL_ERROR_RT_THREAD_SUBSCRIBE);
    CHECK_OK(aclrtDestroyContext(other));
    CHECK_OK(aclrtSetCurrentContext(context));
    CHECK_OK(aclrtLaunchCallback(set_flag, (void *)&it.stop, ACL_CALLBACK_BLOCK, second));
    pthread_join(thread, NULL);
    CHECK_EQ(it.last, 0);
    CHECK_OK(aclrtUnSubscribeReport(it.id, stream));
    CHECK_OK(aclrtDestroyStream(second));                   /* ends its subscription by itself */
}

static void *process_until_unsubscribed(void *argument)
{
    reporter *it = argument;
    CHECK_OK(aclrtSetCurrentContext(context));
    it->id = (uint64_t)pthread_self();
    gate_open(&it->ready);
    gate_await(&it->ready);                                 /* subscribed */
    it->last = aclrtProcessReport(-1);
    return NULL;
}

TEST(test_unsubscribing_the_last_stream_ends_the_wait)
{
    reporter it = { .ready = GATE };
    pthread_t thread;
    pthread_create(&thread, NULL, process_until_unsubscribed, &it);
    pthread_mutex_lock(&it.ready.lock);
    while (!it.ready.open)
        pthread_cond_wait(&it.ready.changed, &it.ready.lock);
    pthread_mutex_unlock(&it.ready.lock);
    CHECK_OK(aclrtSubscribeReport(it.id, stream));
    gate_hold(&it.ready);
    CHECK_OK(aclrtUnSubscribeReport(it.id, stream));
    pthread_join(thread, NULL);
    CHECK_EQ(it.last, ACL_ERROR_RT_THREAD_SUBSCRIBE);
}

TEST(test_host_functions_run_on_a_thread_of_the_runtime_and_hold_the_stream)
{
    note notes = { .count = 0 };
    entry one = { &notes, 1 };
    gate held = GATE;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtLaunchHostFunc(stream, write_down, &one));
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_EQ(notes.count, 0);
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(notes.count, 1);
    CHECK(!pthread_equal(notes.thread, pthread_self()));
}

TEST(test_a_callback_does_not_carry_the_status_of_the_work_before_it)
{
    char *device = device_bytes(64);
    _Atomic int ran = 0;
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:exec=507053"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, stream));
    CHECK_OK(aclrtLaunchHostFunc(stream, set_flag, (void *)&ran));
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    CHECK_EQ(ran, 1);
    CHECK_OK(aclrtFree(device));
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    CHECK_OK(aclrtGetCurrentContext(&context));
    stream = new_stream();
    RUN(test_callbacks_run_inside_process_report_in_stream_order);
    RUN(test_a_blocking_callback_holds_the_stream);
    RUN(test_an_abort_takes_a_callback_back);
    RUN(test_a_dropped_callback_does_not_hold_the_stream);
    RUN(test_one_thread_serves_several_streams_until_a_sentinel);
    RUN(test_unsubscribing_the_last_stream_ends_the_wait);
    RUN(test_host_functions_run_on_a_thread_of_the_runtime_and_hold_the_stream);
    RUN(test_a_callback_does_not_carry_the_status_of_the_work_before_it);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
