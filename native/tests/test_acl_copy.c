/* Copies: what the kinds mean, pageable and pinned memory, bounds, batches. */
#include "gate.h"
#include <sys/mman.h>

enum { SIZE = 4096 };
static char *device, *pinned, *other_device;                /* SIZE bytes each; the last one on device 1 */
static char pageable[SIZE];
static aclrtStream stream;

TEST(test_synchronous_copies_look_at_the_pointers)
{
    memset(pageable, 3, SIZE);
    CHECK_OK(aclrtMemcpy(device, SIZE, pageable, SIZE, ACL_MEMCPY_DEVICE_TO_HOST));        /* the kind is ignored */
    CHECK_EQ(device[SIZE - 1], 3);
    CHECK_OK(aclrtMemcpy(other_device, SIZE, device, SIZE, (aclrtMemcpyKind)77));
    CHECK_OK(aclrtMemcpy(pinned, SIZE, other_device, SIZE, ACL_MEMCPY_DEFAULT));
    CHECK_EQ(pinned[0], 3);
    pinned[0] = 4;
    CHECK_OK(aclrtMemcpy(pageable, SIZE, pinned, SIZE, ACL_MEMCPY_HOST_TO_HOST));
    CHECK_EQ(pageable[0], 4);
}

TEST(test_bounds_are_checked)
{
    CHECK_ERR(aclrtMemcpy(device, 10, pageable, 11, ACL_MEMCPY_DEFAULT), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemcpy(device, SIZE, pageable, 0, ACL_MEMCPY_DEFAULT), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemcpy(device + 1, SIZE, pageable, SIZE, ACL_MEMCPY_DEFAULT), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemcpy(pageable, SIZE, device + 1, SIZE, ACL_MEMCPY_DEFAULT), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemcpy(pinned + 1, SIZE, pageable, SIZE, ACL_MEMCPY_DEFAULT), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemcpyAsync(device + 1, SIZE, pinned, SIZE, ACL_MEMCPY_HOST_TO_DEVICE, stream), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemcpyAsync(device, 10, pinned, 11, ACL_MEMCPY_HOST_TO_DEVICE, stream), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemcpy(pageable, SIZE_MAX, pageable, SIZE_MAX, ACL_MEMCPY_DEFAULT), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemcpy(pageable, SIZE_MAX / 2, pageable, SIZE_MAX / 2, ACL_MEMCPY_DEFAULT), ACL_ERROR_RT_PARAM_INVALID);
}

TEST(test_asynchronous_copies_believe_the_kind_and_check_it)
{
    const struct { void *dst, *src; aclrtMemcpyKind kind; aclError want; } cases[] = {
        { device, pinned, ACL_MEMCPY_HOST_TO_DEVICE, ACL_SUCCESS },
        { pinned, device, ACL_MEMCPY_DEVICE_TO_HOST, ACL_SUCCESS },
        { other_device, device, ACL_MEMCPY_DEVICE_TO_DEVICE, ACL_SUCCESS },
        { device, pageable, ACL_MEMCPY_HOST_TO_DEVICE, ACL_SUCCESS },
        { device, pageable, ACL_MEMCPY_DEFAULT, ACL_SUCCESS },
        { pinned, device, ACL_MEMCPY_DEFAULT, ACL_SUCCESS },
        { pinned, device, ACL_MEMCPY_HOST_TO_DEVICE, ACL_ERROR_RT_INVALID_MEMORY_TYPE },
        { pageable, pinned, ACL_MEMCPY_HOST_TO_DEVICE, ACL_ERROR_RT_INVALID_MEMORY_TYPE },
        { device, device, ACL_MEMCPY_HOST_TO_DEVICE, ACL_ERROR_RT_INVALID_MEMORY_TYPE },
        { device, pinned, ACL_MEMCPY_DEVICE_TO_DEVICE, ACL_ERROR_RT_INVALID_MEMORY_TYPE },
        { pinned, pageable, ACL_MEMCPY_HOST_TO_HOST, ACL_ERROR_RT_FEATURE_NOT_SUPPORT },
        { pinned, pageable, ACL_MEMCPY_DEFAULT, ACL_ERROR_RT_FEATURE_NOT_SUPPORT },
        { device, device, ACL_MEMCPY_HOST_TO_HOST, ACL_ERROR_RT_FEATURE_NOT_SUPPORT },
        { device, pinned, (aclrtMemcpyKind)5, ACL_ERROR_RT_PARAM_INVALID },
        { device, pinned, (aclrtMemcpyKind)-1, ACL_ERROR_RT_PARAM_INVALID },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        aclError plain = aclrtMemcpyAsync(cases[i].dst, SIZE, cases[i].src, SIZE / 2, cases[i].kind, stream);
        aclError conditional = aclrtMemcpyAsyncWithCondition(cases[i].dst, SIZE, cases[i].src, SIZE / 2, cases[i].kind, NULL);
        if (plain != cases[i].want || conditional != cases[i].want)
            printf("case %zu\n", i);
        CHECK_EQ(plain, cases[i].want);
        CHECK_EQ(conditional, cases[i].want);
    }
    CHECK_OK(aclrtSynchronizeDevice());
}

TEST(test_pinned_copies_are_asynchronous)
{
    gate held = GATE;
    pinned[0] = 1;
    device[0] = 0;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtMemcpyAsync(device, SIZE, pinned, SIZE, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    CHECK_EQ(device[0], 0);                                 /* the call came back, and the stream is held */
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[0], 1);
}

static void *open_soon(void *argument)
{
    gate_await(argument);
    gate_open(argument);
    return NULL;
}

/* A device would read or write what is not mapped, and the stream would fail; no crash of the process. */
TEST(test_a_copy_whose_memory_was_freed_fails_in_its_turn)
{
    for (int which = 0; which < 2; which++) {
        char *gone = device_bytes(SIZE);
        gate held = GATE;
        CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
        CHECK_OK(aclrtMemcpyAsync(which ? gone : device, SIZE, which ? device : gone, SIZE, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
        CHECK_OK(aclrtFree(gone));
        gate_open(&held);
        CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_COPY_DATA);
    }
}

TEST(test_pageable_copies_are_complete_when_they_return_and_in_order)
{
    gate held = GATE;
    pthread_t thread;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtMemsetAsync(device, SIZE, 1, SIZE, stream));
    pthread_create(&thread, NULL, open_soon, &held);
    pageable[5] = 9;
    CHECK_OK(aclrtMemcpyAsync(device, SIZE, pageable, 6, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    CHECK_EQ(device[5], 9);                                 /* and not the 1 that the stream wrote before */
    CHECK_EQ(device[6], 1);
    pthread_join(thread, NULL);
    char *registered = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    gate again = GATE;
    CHECK_OK(aclrtHostRegisterV2(registered, SIZE, ACL_HOST_REG_PINNED));
    device[0] = 1;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &again));
    CHECK_OK(aclrtMemcpyAsync(device, SIZE, registered, SIZE, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    CHECK_EQ(device[0], 1);                                 /* pinning made it asynchronous */
    gate_open(&again);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[0], 0);
    CHECK_OK(aclrtHostUnregister(registered));
    munmap(registered, SIZE);
}

static void *abort_when_held(void *argument)
{
    gate *held = argument;
    CHECK_OK(aclrtSetDevice(0));
    gate_await(held);
    CHECK_OK(aclrtStreamAbort(stream));
    gate_open(held);
    CHECK_OK(aclrtResetDevice(0));
    return NULL;
}

TEST(test_an_aborted_pageable_copy_says_so)
{
    /* The abort may come before the copy was submitted; then the copy is simply done. Once it must be the other way. */
    aclError code = ACL_SUCCESS;
    for (int round = 0; round < 100 && code == ACL_SUCCESS; round++) {
        gate held = GATE;
        pthread_t thread;
        CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
        pthread_create(&thread, NULL, abort_when_held, &held);
        code = aclrtMemcpyAsync(device, SIZE, pageable, SIZE, ACL_MEMCPY_HOST_TO_DEVICE, stream);
        pthread_join(thread, NULL);
    }
    CHECK_EQ(code, ACL_ERROR_RT_STREAM_ABORT);
    CHECK_OK(aclrtSynchronizeStream(stream));
}

TEST(test_large_copies_arrive_whole_at_any_alignment)
{
    enum { BIG = (9 << 20) + 777 };
    unsigned char *from = (unsigned char *)device_bytes(BIG), *to = (unsigned char *)device_bytes(BIG + 128);
    for (size_t i = 0; i < BIG; i++)
        from[i] = (unsigned char)(i * 31 + i / 251);
    for (size_t shift = 0; shift < 128; shift += 21) {
        memset(to, 0xee, BIG + 128);
        CHECK_OK(aclrtMemcpyAsync(to + shift, BIG, from, BIG, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
        CHECK_OK(aclrtSynchronizeStream(stream));
        CHECK(!memcmp(to + shift, from, BIG));
        CHECK(to[shift + BIG] == 0xee && (!shift || to[shift - 1] == 0xee));
    }
    CHECK_OK(aclrtFree(from));
    CHECK_OK(aclrtFree(to));
}

/* ---- batches ---- */

enum { N = 5, BLOCK = 512 };
static void *dsts[N], *srcs[N];
static size_t maxs[N], sizes[N], indexes[N], fail;
static aclrtMemcpyBatchAttr attrs[N];
static const aclrtMemLocation on_device = { 0, ACL_MEM_LOCATION_TYPE_DEVICE }, on_host = { 0, ACL_MEM_LOCATION_TYPE_HOST };

static void good_batch(char *host)                          /* block i of the host to block N - 1 - i of the device */
{
    for (int i = 0; i < N; i++) {
        srcs[i] = host + i * BLOCK;
        dsts[i] = device + (N - 1 - i) * BLOCK;
        memset(srcs[i], i + 1, BLOCK);
        maxs[i] = sizes[i] = BLOCK;
    }
    memset(device, 0, SIZE);
    attrs[0] = (aclrtMemcpyBatchAttr){ .dstLoc = on_device, .srcLoc = on_host };
    indexes[0] = 0;
    fail = 77;
}

static void check_arrived(void)
{
    for (int i = 0; i < N; i++)
        CHECK(device[(N - 1 - i) * BLOCK] == i + 1 && device[(N - i) * BLOCK - 1] == i + 1);
    CHECK_EQ(device[N * BLOCK], 0);
}

TEST(test_batches_arrive)
{
    good_batch(pageable);
    CHECK_OK(aclrtMemcpyBatch(dsts, maxs, srcs, sizes, N, attrs, indexes, 1, &fail));
    CHECK_EQ(fail, SIZE_MAX);
    check_arrived();
    good_batch(pinned);
    CHECK_OK(aclrtMemcpyBatchV2(dsts, maxs, srcs, sizes, N, attrs, indexes, 1));
    check_arrived();
    good_batch(pageable);
    CHECK_OK(aclrtMemcpyBatchAsync(dsts, maxs, srcs, sizes, N, attrs, indexes, 1, &fail, stream));
    check_arrived();                                        /* pageable: complete on return */
    good_batch(pinned);
    gate held = GATE;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtMemcpyBatchAsyncV2(dsts, maxs, srcs, sizes, N, attrs, indexes, 1, stream));
    CHECK_EQ(device[0], 0);
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(stream));
    check_arrived();
}

TEST(test_batches_go_back_to_the_host)
{
    good_batch(pinned);
    for (int i = 0; i < N; i++) {
        void *host = srcs[i];
        srcs[i] = dsts[i];
        dsts[i] = host;
    }
    attrs[0] = (aclrtMemcpyBatchAttr){ .dstLoc = on_host, .srcLoc = on_device };
    memset(device, 6, SIZE);
    CHECK_OK(aclrtMemcpyBatchAsync(dsts, maxs, srcs, sizes, N, attrs, indexes, 1, &fail, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(pinned[0], 6);
    CHECK_EQ(pinned[N * BLOCK - 1], 6);
}

static void refused(aclError want, size_t want_fail, size_t count, size_t nattrs)
{
    CHECK_ERR(aclrtMemcpyBatch(dsts, maxs, srcs, sizes, count, attrs, indexes, nattrs, &fail), want);
    CHECK_EQ(fail, want_fail);
    CHECK_ERR(aclrtMemcpyBatchV2(dsts, maxs, srcs, sizes, count, attrs, indexes, nattrs), want);
    fail = 77;
    CHECK_ERR(aclrtMemcpyBatchAsync(dsts, maxs, srcs, sizes, count, attrs, indexes, nattrs, &fail, stream), want);
    CHECK_EQ(fail, want_fail);
    CHECK_ERR(aclrtMemcpyBatchAsyncV2(dsts, maxs, srcs, sizes, count, attrs, indexes, nattrs, stream), want);
    CHECK_OK(aclrtSynchronizeStream(stream));
    for (int i = 0; i < N * BLOCK; i++)
        if (device[i])
            CHECK_EQ(i, -1);                                /* all or nothing */
}

TEST(test_bad_batches_copy_nothing)
{
    good_batch(pinned);
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, 0, 1);
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, SIZE_MAX, 1);
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, N, 0);
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, N, N + 1);
    indexes[0] = 1;
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, N, 1);
    indexes[0] = 0;
    attrs[1] = attrs[2] = attrs[0];
    indexes[1] = indexes[2] = 3;                            /* must increase */
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, N, 3);
    indexes[2] = N;
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, N, 3);
    sizes[4] = BLOCK + 1;
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, N, 1);
    sizes[4] = 0;
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, N, 1);
    good_batch(pinned);
    srcs[4] = NULL;
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, N, 1);
    good_batch(pinned);
    dsts[2] = device + SIZE - 1;
    refused(ACL_ERROR_RT_PARAM_INVALID, SIZE_MAX, N, 1);
}

TEST(test_bad_directions_name_the_item)
{
    good_batch(pinned);
    dsts[3] = pageable;
    refused(ACL_ERROR_RT_INVALID_MEMORY_TYPE, 3, N, 1);
    good_batch(pinned);
    srcs[2] = device;
    refused(ACL_ERROR_RT_INVALID_MEMORY_TYPE, 2, N, 1);
    good_batch(pinned);
    dsts[1] = other_device;
    refused(ACL_ERROR_RT_PARAM_INVALID, 1, N, 1);
    good_batch(pinned);
    attrs[0].srcLoc = on_device;
    refused(ACL_ERROR_RT_PARAM_INVALID, 0, N, 1);
    good_batch(pinned);
    indexes[1] = 4;
    attrs[1] = (aclrtMemcpyBatchAttr){ .dstLoc = on_host, .srcLoc = on_device };
    refused(ACL_ERROR_RT_PARAM_INVALID, 4, N, 2);
    attrs[1] = (aclrtMemcpyBatchAttr){ .dstLoc = { 99, ACL_MEM_LOCATION_TYPE_DEVICE }, .srcLoc = on_host };
    refused(ACL_ERROR_RT_INVALID_DEVICEID, 4, N, 2);
    attrs[1].dstLoc = (aclrtMemLocation){ 0, (aclrtMemLocationType)9 };
    refused(ACL_ERROR_RT_PARAM_INVALID, 4, N, 2);
}

TEST(test_attributes_apply_from_their_index_on)
{
    good_batch(pinned);
    dsts[3] = other_device;
    dsts[4] = other_device + BLOCK;
    indexes[1] = 3;
    attrs[1] = (aclrtMemcpyBatchAttr){ .dstLoc = { 1, ACL_MEM_LOCATION_TYPE_DEVICE }, .srcLoc = on_host };
    CHECK_OK(aclrtMemcpyBatch(dsts, maxs, srcs, sizes, N, attrs, indexes, 2, &fail));
    CHECK_EQ(other_device[BLOCK], 5);
    CHECK_EQ(device[2 * BLOCK], 3);
}

/* How much of a large copy was made when an abort came soon after its beginning. */
static uint64_t copied_until_abort(char *to, const char *from, size_t size)
{
    softnpu_counters before, after;
    gate held = GATE;
    softnpu_get_counters(&before);
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtMemcpyAsync(to, size, from, size, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    gate_open(&held);
    do
        softnpu_get_counters(&after);                       /* until the copy has begun */
    while (after.bytes_copied == before.bytes_copied);
    CHECK_OK(aclrtStreamAbort(stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    softnpu_get_counters(&after);
    return after.bytes_copied - before.bytes_copied;
}

TEST(test_an_aborted_copy_stops_early)
{
    enum { LARGE = 128 << 20 };
    char *from = device_bytes(LARGE), *to = device_bytes(LARGE);
    uint64_t copied = LARGE;
    for (int round = 0; round < 50 && copied == LARGE; round++)           /* on a busy machine the abort can come too late */
        copied = copied_until_abort(to, from, LARGE);
    CHECK(copied < LARGE);
    CHECK_OK(aclrtFree(from));
    CHECK_OK(aclrtFree(to));
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(1));
    other_device = device_bytes(SIZE);
    CHECK_OK(aclrtSetDevice(0));
    device = device_bytes(SIZE);
    pinned = pinned_bytes(SIZE);
    stream = new_stream();
    RUN(test_synchronous_copies_look_at_the_pointers);
    RUN(test_bounds_are_checked);
    RUN(test_asynchronous_copies_believe_the_kind_and_check_it);
    RUN(test_pinned_copies_are_asynchronous);
    RUN(test_a_copy_whose_memory_was_freed_fails_in_its_turn);
    RUN(test_pageable_copies_are_complete_when_they_return_and_in_order);
    RUN(test_an_aborted_pageable_copy_says_so);
    RUN(test_large_copies_arrive_whole_at_any_alignment);
    RUN(test_batches_arrive);
    RUN(test_batches_go_back_to_the_host);
    RUN(test_bad_batches_copy_nothing);
    RUN(test_bad_directions_name_the_item);
    RUN(test_attributes_apply_from_their_index_on);
    RUN(test_an_aborted_copy_stops_early);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
    CHECK_OK(aclrtFree(other_device));
    CHECK_OK(aclrtFreeHost(pinned));
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclrtResetDevice(1));
    CHECK_OK(aclFinalize());
    return check_done();
}
