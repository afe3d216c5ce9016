/* Batches that are unfolded on the device, as on an A3 unless the configuration says HOST (hccl_unfold.h has the sources). */
#include "roce_kit.h"

static void run_aicpu(rank_body *body)
{
    setenv("SOFTNPU_STRICT", "aicpu", 1);
    run_pair(body);
}

/* The communicator's own stream hangs: destroying it waits no longer than this. */
static void limit_destroy(void)
{
    setenv("HCCL_EXEC_TIMEOUT", "1", 1);
}

static void abort_stops_no_copy(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        softnpu_fault("HcclBatchGet:delay=100@1;HcclBatchGet:hang@2");
        CHECK_OK(get(&end, end.free, 0, 0, 64));
        CHECK_OK(aclrtStreamAbort(end.free));
        await_change(end.mine, 0);                          /* written all the same */
        CHECK_OK(get(&end, end.gated, QUARTER, 0, 64));
        CHECK_OK(aclrtSynchronizeStream(end.gated));        /* by the end of the aborted one */
        CHECK(all_are(end.mine + QUARTER, 64, 0));
        limit_destroy();
    }
    close_end(&end);
}

TEST(test_an_abort_stops_no_copy_whose_end_is_taken_for_the_next_ones)
{
    run_aicpu(abort_stops_no_copy);
}

static void gate_holds(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        shut_gate(&end);
        CHECK_OK(get(&end, end.gated, 0, 0, 64));
        CHECK_OK(get(&end, end.free, QUARTER, 0, 64));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        CHECK(holds(end.mine + QUARTER, 64, 1));
        CHECK(all_are(end.mine, 64, 0));
        open_gate(&end);
        CHECK_OK(aclrtSynchronizeStream(end.gated));
        CHECK(holds(end.mine, 64, 1));
    }
    close_end(&end);
}

TEST(test_a_shut_gate_holds_because_the_kernel_is_behind_it)
{
    run_aicpu(gate_holds);
}

static void destroy_waits(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        softnpu_fault("HcclBatchGet:delay=200");
        CHECK_OK(get(&end, end.free, 0, 0, 64));
        CHECK_OK(aclrtStreamAbort(end.free));
        CHECK(all_are(end.mine, 64, 0));
        CHECK_OK(HcclCommDestroy(end.comm));
        end.comm = NULL;
        CHECK(holds(end.mine, 64, 1));
    }
    close_end(&end);
}

TEST(test_destroying_waits_for_the_communicators_own_stream)
{
    run_aicpu(destroy_waits);
}

static void refused_is_not_begun(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        HcclOneSideOpDesc items[] = { item(&end, 0, 0, 64), item(&end, 64, LENT, 64) };
        CHECK_ERR(HcclBatchGet(end.comm, 1, items, 2, end.free), HCCL_E_INTERNAL);
        CHECK_OK(get(&end, end.free, QUARTER, 0, 64));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        CHECK(all_are(end.mine, 64, 0));
    }
    close_end(&end);
}

TEST(test_a_batch_with_a_bad_item_launches_no_kernel)
{
    run_aicpu(refused_is_not_begun);
}

/* ---- two calls at once ---- */

enum { ITEMS = 64, SIZE = 16, ROUNDS = 5000 };

typedef struct caller { const roce_end *end; aclrtContext context; atomic_bool begun, over; } caller;

static HcclResult get_many(const roce_end *end, aclrtStream stream, uint64_t at)
{
    HcclOneSideOpDesc items[ITEMS];
    for (uint64_t i = 0; i < ITEMS; i++)
        items[i] = item(end, at + i * 2 * SIZE, at + i * 2 * SIZE, SIZE);
    return HcclBatchGet(end->comm, 1, items, ITEMS, stream);
}

static void *call_again_and_again(void *argument)
{
    caller *mine = argument;
    CHECK_OK(aclrtSetCurrentContext(mine->context));
    for (; !atomic_load(&mine->over); atomic_store(&mine->begun, true))
        CHECK_OK(get_many(mine->end, mine->end->free, QUARTER));
    return NULL;
}

/* One call beside those of another thread. Is an item of it left empty when all has landed? Then it was another call's. */
static bool mixes(const roce_end *end, aclrtContext context)
{
    caller beside = { .end = end, .context = context };
    bool mixed = false;
    pthread_t thread;
    memset(end->mine, 0, LENT);
    CHECK_EQ(pthread_create(&thread, NULL, call_again_and_again, &beside), 0);
    while (!atomic_load(&beside.begun))
        sched_yield();
    CHECK_OK(get_many(end, end->gated, 0));
    atomic_store(&beside.over, true);
    pthread_join(thread, NULL);
    aclrtStream last = new_stream();                        /* the others may wait for a notify that one of them has taken */
    CHECK_OK(get(end, last, LENT - 64, 0, 64));             /* behind this call's batch on the communicator's own stream */
    await_change(end->mine + LENT - 64, 0);
    for (uint64_t i = 0; i < ITEMS; i++)
        mixed |= all_are(end->mine + i * 2 * SIZE, SIZE, 0);
    CHECK_OK(aclrtStreamAbort(end->gated));                 /* of several ends the notify tells one */
    CHECK_OK(aclrtStreamAbort(end->free));
    CHECK_OK(aclrtDestroyStreamForce(last));
    return mixed;
}

static void arguments_mix(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    aclrtContext context;
    bool mixed = false;
    CHECK_OK(aclrtGetCurrentContext(&context));
    for (int round = 0; rank == 0 && !mixed && round < ROUNDS; round++)
        mixed = mixes(&end, context);
    CHECK_EQ(mixed, rank == 0);
    close_end(&end);
}

TEST(test_two_calls_at_once_mix_their_items)
{
    run_aicpu(arguments_mix);
}

/* ---- where it is done: a batch that hangs holds up the communicator's own stream, or its caller's only ---- */

static void is_unfolded(const roce_end *end, bool expected)
{
    softnpu_fault("HcclBatchGet:hang@1");
    CHECK_OK(get(end, end->free, 0, 0, 64));
    CHECK_OK(get(end, end->gated, QUARTER, 0, 64));
    if (expected)
        CHECK_ERR(aclrtSynchronizeStreamWithTimeout(end->gated, 50), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    else
        CHECK_OK(aclrtSynchronizeStream(end->gated));
    CHECK_OK(aclrtStreamAbort(end->free));
    CHECK_OK(aclrtSynchronizeStream(end->free));
    limit_destroy();
}

static void on_the_device(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0)
        is_unfolded(&end, true);
    close_end(&end);
}

static void on_the_host(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0)
        is_unfolded(&end, false);
    close_end(&end);
}

/* [src externalinput.cc:1706-1732; comm_config.cc:352-357] */
TEST(test_the_configuration_decides_then_the_environment)
{
    run_aicpu(on_the_device);
    setenv("HCCL_OP_EXPANSION_MODE", "AIV", 1);
    run_aicpu(on_the_device);
    expansion_mode = 1;
    run_aicpu(on_the_host);
    expansion_mode = 0;
    setenv("HCCL_OP_EXPANSION_MODE", "HOST", 1);
    run_aicpu(on_the_host);
    expansion_mode = 2;
    run_aicpu(on_the_device);
    unsetenv("HCCL_OP_EXPANSION_MODE");
}

TEST(test_a_library_that_does_not_know_the_field_ignores_it)
{
    expansion_mode = 1;
    setenv("SOFTNPU_FAULTS", "HcclGetCommConfigCapability:fail=4@*", 1);
    run_aicpu(on_the_device);
    unsetenv("SOFTNPU_FAULTS");
    expansion_mode = 0;
}

int main(void)
{
    RUN(test_an_abort_stops_no_copy_whose_end_is_taken_for_the_next_ones);
    RUN(test_a_shut_gate_holds_because_the_kernel_is_behind_it);
    RUN(test_destroying_waits_for_the_communicators_own_stream);
    RUN(test_a_batch_with_a_bad_item_launches_no_kernel);
    RUN(test_two_calls_at_once_mix_their_items);
    RUN(test_the_configuration_decides_then_the_environment);
    RUN(test_a_library_that_does_not_know_the_field_ignores_it);
    return check_done();
}
