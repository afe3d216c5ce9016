/* Holds: a task or a call stands still where the test wants it, and continues when the test says so. */
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include "gate.h"

enum { BYTES = 4 << 20 };

static aclrtStream stream;
static char *device;

static void await_arrival(const char *name)
{
    eventfd_t count;
    struct pollfd wait = { .fd = softnpu_hold_arrivals(name), .events = POLLIN };
    CHECK(wait.fd >= 0);
    while (poll(&wait, 1, -1) < 1) { }
    CHECK_EQ(eventfd_read(wait.fd, &count), 0);
}

static void fill_later(int value)
{
    CHECK_OK(aclrtMemsetAsync(device, BYTES, value, BYTES, stream));
}

TEST(test_task_stands_before_its_first_byte)
{
    memset(device, 0, BYTES);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hold=first"), 0);
    fill_later(1);
    await_arrival("first");
    CHECK_EQ(device[0], 0);
    CHECK_EQ(device[BYTES - 1], 0);
    CHECK_EQ(softnpu_hold_release("first"), 0);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[BYTES - 1], 1);
    CHECK_EQ(softnpu_hold_arrivals("first"), -1);
    CHECK_EQ(softnpu_hold_release("first"), -1);
}

TEST(test_aborted_task_that_stood_before_its_first_byte_moves_nothing)
{
    memset(device, 0, BYTES);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hold=first"), 0);
    fill_later(1);
    await_arrival("first");
    CHECK_OK(aclrtStreamAbort(stream));
    CHECK_EQ(softnpu_hold_release("first"), 0);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[0], 0);
    CHECK_EQ(device[BYTES - 1], 0);
}

TEST(test_task_stands_in_the_middle_of_its_bytes)
{
    memset(device, 0, BYTES);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:half=middle"), 0);
    fill_later(1);
    await_arrival("middle");
    CHECK_EQ(device[0], 1);
    CHECK_EQ(device[BYTES / 2 - 1], 1);
    CHECK_EQ(device[BYTES / 2], 0);
    CHECK_EQ(device[BYTES - 1], 0);
    CHECK_OK(aclrtStreamAbort(stream));                     /* too late for the bytes on their way, in time for the rest */
    CHECK_EQ(softnpu_hold_release("middle"), 0);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[BYTES / 2], 1);
    CHECK_EQ(device[BYTES - 1], 0);
}

TEST(test_middle_of_a_batch_is_counted_through_its_items)
{
    enum { ITEMS = 8, SIZE = 4096 };
    char *from = pinned_bytes(ITEMS * SIZE);
    void *dsts[ITEMS], *srcs[ITEMS];
    size_t sizes[ITEMS], index = 0;
    aclrtMemcpyBatchAttr attr;
    memset(&attr, 0, sizeof attr);
    attr.srcLoc.type = ACL_MEM_LOCATION_TYPE_HOST;
    attr.dstLoc.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    memset(from, 3, ITEMS * SIZE);
    memset(device, 0, BYTES);
    for (int i = 0; i < ITEMS; i++) {
        dsts[i] = device + i * SIZE;
        srcs[i] = from + i * SIZE;
        sizes[i] = SIZE;
    }
    CHECK_EQ(softnpu_fault("aclrtMemcpyBatchAsync:half=middle"), 0);
    CHECK_OK(aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, ITEMS, &attr, &index, 1, NULL, stream));
    await_arrival("middle");
    CHECK_EQ(device[ITEMS / 2 * SIZE - 1], 3);
    CHECK_EQ(device[ITEMS / 2 * SIZE], 0);
    CHECK_EQ(softnpu_hold_release("middle"), 0);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[ITEMS * SIZE - 1], 3);
    CHECK_OK(aclrtFreeHost(from));
}

static void *get_device(void *answer)
{
    CHECK_OK(aclrtSetDevice(0));
    return answer;
}

TEST(test_call_without_a_task_stands_before_it_does_anything)
{
    pthread_t thread;
    CHECK_EQ(softnpu_fault("aclrtSetDevice:hold=call"), 0);
    CHECK_EQ(pthread_create(&thread, NULL, get_device, NULL), 0);
    await_arrival("call");
    CHECK_EQ(softnpu_hold_release("call"), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
}

TEST(test_hold_that_was_released_before_stops_nothing)
{
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hold=early"), 0);
    CHECK_EQ(softnpu_hold_release("early"), 0);
    fill_later(4);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[BYTES - 1], 4);
}

TEST(test_clearing_faults_releases_holds)
{
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hold=any"), 0);
    fill_later(5);
    await_arrival("any");
    softnpu_fault_clear();
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[BYTES - 1], 5);
}

TEST(test_sixty_four_holds_and_no_more)
{
    char spec[64];
    for (int i = 0; i < 64; i++) {
        snprintf(spec, sizeof spec, "aclrtMemsetAsync:hold=n%d@1000", i);
        CHECK_EQ(softnpu_fault(spec), 0);
    }
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hold=n63@1000"), 0);   /* has a place already */
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hold=n64@1000"), -1);
    softnpu_fault_clear();
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hold=n64@1000"), 0);
    softnpu_fault_clear();
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    stream = new_stream();
    device = device_bytes(BYTES);
    RUN(test_task_stands_before_its_first_byte);
    RUN(test_aborted_task_that_stood_before_its_first_byte_moves_nothing);
    RUN(test_task_stands_in_the_middle_of_its_bytes);
    RUN(test_middle_of_a_batch_is_counted_through_its_items);
    RUN(test_call_without_a_task_stands_before_it_does_anything);
    RUN(test_hold_that_was_released_before_stops_nothing);
    RUN(test_clearing_faults_releases_holds);
    RUN(test_sixty_four_holds_and_no_more);
    return check_done();
}
