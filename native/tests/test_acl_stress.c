/* Many threads at once: shared streams, aborts under load, streams that come and go. */
#include "gate.h"

enum { THREADS = 4, ROUNDS = 300, BLOCK = 4096 };

static aclrtContext context;
static aclrtStream shared[2];
static char *device;
static _Atomic int stop;

static pthread_t start(void *(*body)(void *), void *argument)
{
    pthread_t thread;
    pthread_create(&thread, NULL, body, argument);
    return thread;
}

static void on_threads(void *(*body)(void *))
{
    pthread_t threads[THREADS];
    for (intptr_t i = 0; i < THREADS; i++)
        threads[i] = start(body, (void *)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

/* Each thread increments the counter from host functions and copies; the stream's order is what keeps the count right. */
static int order_dependent[2];

static void increment(void *argument)
{
    ++*(int *)argument;
}

static void *submit_to_shared(void *number)
{
    intptr_t me = (intptr_t)number;
    CHECK_OK(aclrtSetCurrentContext(context));
    for (int i = 0; i < ROUNDS; i++) {
        aclrtStream stream = shared[i % 2];
        char *mine = device + (me * 2 + i % 2) * 2 * BLOCK; /* no order between the streams, so nothing shared between them */
        CHECK_OK(aclrtMemsetAsync(mine, BLOCK, i, BLOCK, stream));
        CHECK_OK(aclrtMemcpyAsync(mine + BLOCK, BLOCK, mine, BLOCK, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
        if (i % 8 < 2)
            CHECK_OK(aclrtLaunchHostFunc(stream, increment, &order_dependent[i % 2]));
        if (i % 16 == 15)
            CHECK_OK(aclrtSynchronizeStream(stream));
    }
    CHECK_OK(aclrtSynchronizeStream(shared[0]));
    CHECK_OK(aclrtSynchronizeStream(shared[1]));
    return NULL;
}

TEST(test_four_threads_share_two_streams)
{
    on_threads(submit_to_shared);
    CHECK_EQ(order_dependent[0] + order_dependent[1], THREADS * 76);      /* of 300 rounds those with i % 8 < 2 */
}

static void *submit_until_stopped(void *number)
{
    intptr_t me = (intptr_t)number;
    char *mine = device + me * 2 * BLOCK;
    CHECK_OK(aclrtSetCurrentContext(context));
    while (!stop) {
        CHECK_OK(aclrtMemsetAsync(mine, BLOCK, 1, BLOCK, shared[0]));
        CHECK_OK(aclrtLaunchHostFunc(shared[0], increment, &order_dependent[0]));
        aclError code = aclrtSynchronizeStream(shared[0]);
        if (code)
            CHECK_EQ(code, ACL_ERROR_RT_STREAM_ABORT);
        memset(mine, 2, BLOCK);                             /* ours again, aborted or not: TSan would see a late write */
    }
    return NULL;
}

static void *abort_again_and_again(void *unused)
{
    CHECK_OK(aclrtSetCurrentContext(context));
    for (int i = 0; i < ROUNDS; i++) {
        CHECK_OK(aclrtStreamAbort(shared[0]));
        sched_yield();
    }
    stop = 1;
    return unused;
}

TEST(test_aborts_under_load)
{
    pthread_t aborter = start(abort_again_and_again, NULL);
    on_threads(submit_until_stopped);
    pthread_join(aborter, NULL);
    stop = 0;
    CHECK_OK(aclrtSynchronizeStream(shared[0]));
    CHECK_OK(aclrtMemsetAsync(device, BLOCK, 3, BLOCK, shared[0]));
    CHECK_OK(aclrtSynchronizeStream(shared[0]));
    CHECK_EQ(device[0], 3);
}

static void *make_and_destroy(void *number)
{
    intptr_t me = (intptr_t)number;
    CHECK_OK(aclrtSetCurrentContext(context));
    for (int i = 0; i < ROUNDS / 10; i++) {
        aclrtStream stream = new_stream();
        aclrtEvent event = new_event();
        char *memory = device_bytes(BLOCK * 16), *host = pinned_bytes(BLOCK * 16);
        CHECK_OK(aclrtMemcpyAsync(memory, BLOCK * 16, host, BLOCK * 16, ACL_MEMCPY_HOST_TO_DEVICE, stream));
        CHECK_OK(aclrtRecordEvent(event, shared[me % 2]));
        CHECK_OK(aclrtStreamWaitEvent(stream, event));
        CHECK_OK(aclrtRecordEvent(event, stream));
        CHECK_OK(aclrtDestroyEvent(event));
        CHECK_OK(i % 2 ? aclrtDestroyStream(stream) : aclrtDestroyStreamForce(stream));
        CHECK_OK(aclrtFree(memory));
        CHECK_OK(aclrtFreeHost(host));
    }
    return NULL;
}

TEST(test_everything_comes_and_goes)
{
    softnpu_counters before, after;
    softnpu_get_counters(&before);
    on_threads(make_and_destroy);
    CHECK_OK(aclrtSynchronizeDevice());
    softnpu_get_counters(&after);
    CHECK_EQ(after.streams, before.streams);
    CHECK_EQ(after.events, before.events);
    CHECK_EQ(after.allocations, before.allocations);
    CHECK_EQ(after.device_bytes, before.device_bytes);
    CHECK_EQ(after.threads, before.threads);
}

static void *set_and_reset(void *number)
{
    for (int i = 0; i < ROUNDS / 10; i++) {
        char *memory;
        CHECK_OK(aclrtSetDevice(1));
        memory = device_bytes(BLOCK);
        CHECK_OK(aclrtMemsetAsync(memory, BLOCK, i, BLOCK, NULL));
        CHECK_OK(aclrtSynchronizeStream(NULL));
        CHECK_OK(aclrtFree(memory));
        CHECK_OK(aclrtResetDevice(1));
    }
    return number;
}

TEST(test_default_contexts_come_and_go)
{
    on_threads(set_and_reset);
    CHECK_ERR(aclrtResetDevice(1), ACL_ERROR_RT_CONTEXT_NULL);
}

static void *fail_now_and_then(void *number)
{
    intptr_t me = (intptr_t)number;
    CHECK_OK(aclrtSetCurrentContext(context));
    for (int i = 0; i < ROUNDS / 3; i++) {
        aclError code = aclrtMemsetAsync(device + me * BLOCK, BLOCK, 1, BLOCK, shared[1]);
        if (code == ACL_SUCCESS)
            code = aclrtSynchronizeStream(shared[1]);
        if (code)                                           /* stopped, by whomever: an abort makes it usable again */
            CHECK_OK(aclrtStreamAbort(shared[1]));
        if (code != ACL_ERROR_RT_STREAM_ABORT && code != ACL_SUCCESS)
            CHECK_EQ(code, ACL_ERROR_RT_COPY_DATA);
    }
    return NULL;
}

static void *plant_faults(void *unused)
{
    for (int i = 0; i < 50; i++) {
        CHECK_EQ(softnpu_fault("aclrtMemsetAsync:exec=507052@3"), 0);
        sched_yield();
    }
    return unused;
}

TEST(test_stop_on_failure_under_load)
{
    CHECK_OK(aclrtSetStreamFailureMode(shared[1], ACL_STOP_ON_FAILURE));
    pthread_t planter = start(plant_faults, NULL);
    on_threads(fail_now_and_then);
    pthread_join(planter, NULL);
    softnpu_fault_clear();
    CHECK_OK(aclrtStreamAbort(shared[1]));
    CHECK_OK(aclrtMemsetAsync(device, BLOCK, 1, BLOCK, shared[1]));
    CHECK_OK(aclrtSynchronizeStream(shared[1]));
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtCreateContext(&context, 0));
    device = device_bytes(THREADS * 4 * BLOCK);
    shared[0] = new_stream();
    shared[1] = new_stream();
    RUN(test_four_threads_share_two_streams);
    RUN(test_aborts_under_load);
    RUN(test_everything_comes_and_goes);
    RUN(test_default_contexts_come_and_go);
    RUN(test_stop_on_failure_under_load);
    CHECK_OK(aclrtSetCurrentContext(context));
    CHECK_OK(aclrtDestroyStream(shared[0]));
    CHECK_OK(aclrtDestroyStream(shared[1]));
    CHECK_OK(aclrtFree(device));
    CHECK_OK(aclrtDestroyContext(context));
    CHECK_OK(aclFinalize());
    return check_done();
}
