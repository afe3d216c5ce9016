/* How many communicators there may be, and who may make them at once. */
#include <pthread.h>
#include <sched.h>
#include "strict_kit.h"

static const char one_rank[] =
    "{\"version\": \"1.0\", \"status\": \"completed\", \"server_list\": [{\"server_id\": \"a\", \"device\": ["
    "{\"device_id\": \"%d\", \"device_ip\": \"10.0.0.1\", \"rank_id\": \"0\"}]}]}";

static HcclResult from_file(int device, const char *name, HcclComm *comm)
{
    char path[] = "/tmp/softnpu-world-XXXXXX", text[300];
    HcclCommConfig config = named_config(name);
    int fd = mkstemp(path), length = snprintf(text, sizeof text, one_rank, device);
    CHECK_EQ(write(fd, text, (size_t)length), length);
    close(fd);
    HcclResult code = HcclCommInitClusterInfoConfig(path, 0, &config, comm);
    unlink(path);
    return code;
}

static HcclResult one_sided(const char *name, HcclComm *comm)
{
    char text[300];
    HcclCommConfig config = named_config(name);
    snprintf(text, sizeof text, one_rank, 0);
    return HcclCommInitClusterInfoMemConfig(text, 0, &config, comm);
}

/* [src op_base.cc:430-447, 1087-1088] */
static void worlds(void)
{
    HcclComm first, second, third;
    HcclRootInfo root;
    CHECK_OK(from_file(0, "one", &first));
    CHECK_ERR(from_file(0, "two", &second), HCCL_E_UNAVAIL);
    CHECK_OK(aclrtSetDevice(1));
    CHECK_OK(from_file(1, "other device", &second));
    CHECK_OK(HcclCommDestroy(second));
    CHECK_OK(aclrtResetDevice(1));
    CHECK_OK(aclrtSetDevice(0));
    CHECK_OK(HcclGetRootInfo(&root));
    CHECK_OK(HcclCommInitRootInfo(1, &root, 0, &second));   /* not from a table */
    CHECK_OK(HcclCommDestroy(second));
    CHECK_OK(one_sided("a", &second));
    CHECK_OK(one_sided("b", &third));
    CHECK_OK(HcclCommDestroy(second));
    CHECK_OK(HcclCommDestroy(third));
    CHECK_OK(HcclCommDestroy(first));
    CHECK_OK(from_file(0, "one", &first));                  /* the device is free again */
    CHECK_OK(HcclCommDestroy(first));
    CHECK_OK(aclrtResetDevice(0));
}

TEST(test_a_device_has_one_communicator_of_a_rank_table_over_hccs)
{
    run_alone("hccs", worlds);
}

TEST(test_a_device_has_one_communicator_of_a_rank_table_over_roce)
{
    run_alone("roce", worlds);
}

/* ---- [src op_base.cc:368-426, 831-912, 3697] ---- */

typedef struct maker { const char *name; HcclResult code; HcclComm comm; atomic_bool started, done; } maker;

static void *make(void *argument)
{
    maker *self = argument;
    CHECK_OK(aclrtSetDevice(0));
    atomic_store(&self->started, true);
    self->code = one_sided(self->name, &self->comm);
    CHECK_OK(aclrtResetDevice(0));
    atomic_store(&self->done, true);
    return NULL;
}

static HcclResult destroy_again(HcclComm comm)              /* it is refused while the other thread makes one */
{
    HcclResult code;
    do
        code = HcclCommDestroy(comm);
    while (code == HCCL_E_INTERNAL);
    return code;
}

static void both_make(void)
{
    maker other = { .name = "other" };
    HcclComm mine;
    pthread_t thread;
    softnpu_counters seen;
    CHECK_EQ(softnpu_fault("HcclCommInitClusterInfoMemConfig:delay=50@*"), 0);
    CHECK_EQ(pthread_create(&thread, NULL, make, &other), 0);
    for (HcclResult code = HCCL_SUCCESS; !atomic_load(&other.done); ) {
        code = one_sided("mine", &mine);
        CHECK(code == HCCL_SUCCESS || code == HCCL_E_INTERNAL);
        if (!code)
            CHECK_OK(destroy_again(mine));
    }
    pthread_join(thread, NULL);
    softnpu_fault_clear();
    CHECK(other.code == HCCL_SUCCESS || other.code == HCCL_E_INTERNAL);
    softnpu_get_counters(&seen);
    CHECK(seen.races > 0);
    if (!other.code)
        CHECK_OK(HcclCommDestroy(other.comm));
}

TEST(test_two_threads_that_make_one_sided_communicators_at_once_are_a_race)
{
    run_alone("hccs", both_make);
}

/* One round: the other thread makes a communicator, which takes 100 ms; meanwhile, or a moment too early, this one destroys. */
static bool destroys_meanwhile(void)
{
    maker other = { .name = "other" };
    HcclComm mine;
    pthread_t thread;
    CHECK_OK(one_sided("mine", &mine));
    CHECK_EQ(softnpu_fault("HcclCommInitClusterInfoMemConfig:delay=100"), 0);
    CHECK_EQ(pthread_create(&thread, NULL, make, &other), 0);
    while (!atomic_load(&other.started))
        sched_yield();
    for (int i = 0; i < 100; i++)
        sched_yield();
    HcclResult code = HcclCommDestroy(mine);
    pthread_join(thread, NULL);
    CHECK_OK(other.code);
    CHECK_OK(HcclCommDestroy(other.comm));
    if (code) {
        CHECK_EQ(code, HCCL_E_INTERNAL);
        CHECK_OK(HcclCommDestroy(mine));
    }
    return code != HCCL_SUCCESS;
}

static void one_destroys(void)
{
    softnpu_counters seen;
    int rounds = 0;
    while (!destroys_meanwhile() && rounds < 100)
        rounds++;
    softnpu_get_counters(&seen);
    CHECK_EQ(seen.races, 1);
}

TEST(test_a_thread_that_destroys_while_another_makes_is_a_race)
{
    run_alone("roce", one_destroys);
}

static void one_after_the_other(void)
{
    HcclComm comm;
    softnpu_counters seen;
    for (int i = 0; i < 10; i++) {
        CHECK_OK(one_sided("mine", &comm));
        CHECK_OK(HcclCommDestroy(comm));
    }
    softnpu_get_counters(&seen);
    CHECK_EQ(seen.races, 0);
}

TEST(test_one_after_the_other_is_no_race)
{
    run_alone("hccs", one_after_the_other);
}

/* ---- [doc HCCL_CONNECT_TIMEOUT] ---- */

static void short_limit(void)
{
    HcclComm comm;
    HcclRootInfo root;
    CHECK_OK(HcclGetRootInfo(&root));
    setenv("HCCL_CONNECT_TIMEOUT", "119", 1);
    CHECK_ERR(one_sided("mine", &comm), HCCL_E_PARA);
    CHECK_ERR(HcclCommInitRootInfo(1, &root, 0, &comm), HCCL_E_PARA);
    setenv("HCCL_CONNECT_TIMEOUT", "7201", 1);
    CHECK_ERR(one_sided("mine", &comm), HCCL_E_PARA);
    setenv("HCCL_CONNECT_TIMEOUT", "120", 1);
    CHECK_OK(one_sided("mine", &comm));
    CHECK_OK(HcclCommDestroy(comm));
    setenv("SOFTNPU_CONNECT_TIMEOUT", "1", 1);              /* that is how long tests wait */
    CHECK_ERR(HcclCommInitRootInfo(2, &root, 0, &comm), HCCL_E_TIMEOUT);
    unsetenv("SOFTNPU_CONNECT_TIMEOUT");
    unsetenv("HCCL_CONNECT_TIMEOUT");
}

TEST(test_a_connect_timeout_is_120_seconds_or_more)
{
    run_alone("hccs", short_limit);
}

int main(void)
{
    RUN(test_a_device_has_one_communicator_of_a_rank_table_over_hccs);
    RUN(test_a_device_has_one_communicator_of_a_rank_table_over_roce);
    RUN(test_two_threads_that_make_one_sided_communicators_at_once_are_a_race);
    RUN(test_a_thread_that_destroys_while_another_makes_is_a_race);
    RUN(test_one_after_the_other_is_no_race);
    RUN(test_a_connect_timeout_is_120_seconds_or_more);
    return check_done();
}
