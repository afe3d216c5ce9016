/* The rules of registering, binding and naming, and what garbage arguments get. One process, no peer. */
#include "hccl_pair.h"

static HcclResult try_name(const char *name, uint32_t rank, HcclComm *comm)
{
    HcclCommConfig config = named_config(name);
    return HcclCommInitClusterInfoMemConfig(two_ranks, rank, &config, comm);
}

static HcclResult try_register(CommMemType type, void *addr, uint64_t size, void **handle)
{
    CommMem mem = { type, addr, size };
    return HcclRegisterGlobalMem(&mem, handle);
}

TEST(test_the_identical_range_is_the_same_registration)
{
    static char memory[8192];
    void *first, *again, *other;
    CHECK_OK(try_register(COMM_MEM_TYPE_HOST, memory + 1000, 4096, &first));
    CHECK_OK(try_register(COMM_MEM_TYPE_HOST, memory + 1000, 4096, &again));
    CHECK(first == again);
    CHECK_ERR(try_register(COMM_MEM_TYPE_DEVICE, memory + 1000, 4096, &other), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_HOST, memory + 1000, 4095, &other), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_HOST, memory + 999, 2, &other), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_HOST, memory + 5095, 2, &other), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_HOST, memory, 8192, &other), HCCL_E_PARA);
    CHECK_OK(try_register(COMM_MEM_TYPE_HOST, memory + 5096, 1, &other));
    CHECK(other != first);
    CHECK_OK(HcclDeregisterGlobalMem(other));
    CHECK_OK(HcclDeregisterGlobalMem(first));
    CHECK_OK(HcclDeregisterGlobalMem(first));               /* registered twice */
    CHECK_ERR(HcclDeregisterGlobalMem(first), HCCL_E_NOT_FOUND);
}

TEST(test_known_memory_has_a_type_and_an_end)
{
    void *device, *handle;
    static char unknown[64];
    CHECK_OK(aclrtMalloc(&device, 4096, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_ERR(try_register(COMM_MEM_TYPE_HOST, device, 4096, &handle), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_DEVICE, device, 1 << 20, &handle), HCCL_E_PARA);
    CHECK_ERR(try_register((CommMemType)2, device, 4096, &handle), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_INVALID, device, 4096, &handle), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_DEVICE, device, 0, &handle), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_DEVICE, NULL, 4096, &handle), HCCL_E_PTR);
    CHECK_ERR(try_register(COMM_MEM_TYPE_DEVICE, unknown, ((uint64_t)64 << 30) + 1, &handle), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_HOST, unknown, ((uint64_t)1 << 40) + 1, &handle), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_HOST, unknown, UINT64_MAX, &handle), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_HOST, (void *)UINTPTR_MAX, 4096, &handle), HCCL_E_PARA);
    CHECK_ERR(try_register(COMM_MEM_TYPE_HOST, (void *)4096, 4096, &handle), HCCL_E_PARA);   /* nothing is mapped there */
    CHECK_OK(aclrtFree(device));
}

TEST(test_unknown_memory_is_adopted_while_it_is_registered)
{
    static char memory[4096];
    void *handle;
    softnpu_counters counters;
    CHECK_OK(try_register(COMM_MEM_TYPE_DEVICE, memory, sizeof memory, &handle));
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.adopted, 1);
    CHECK_OK(HcclDeregisterGlobalMem(handle));
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.adopted, 0);
}

TEST(test_bound_regions_stay_registered)
{
    static char memory[4096];
    void *handle;
    HcclComm comm = new_one_sided("bind", 0);
    CHECK_OK(try_register(COMM_MEM_TYPE_HOST, memory, sizeof memory, &handle));
    CHECK_ERR(HcclCommUnbindMem(comm, handle), HCCL_E_NOT_FOUND);
    CHECK_OK(HcclCommBindMem(comm, handle));
    CHECK_ERR(HcclCommBindMem(comm, handle), HCCL_E_PARA);
    CHECK_ERR(HcclDeregisterGlobalMem(handle), HCCL_E_PARA);
    CHECK_OK(HcclCommUnbindMem(comm, handle));
    CHECK_OK(HcclCommBindMem(comm, handle));
    CHECK_OK(HcclCommDestroy(comm));                        /* unbinds */
    CHECK_OK(HcclDeregisterGlobalMem(handle));
}

TEST(test_names_are_unique_per_device)
{
    HcclComm first = NULL, second = NULL, third = NULL;
    CHECK_OK(try_name("twice", 0, &first));
    CHECK_ERR(try_name("twice", 1, &second), HCCL_E_PARA);
    CHECK_OK(aclrtSetDevice(1));
    CHECK_OK(try_name("twice", 1, &third));                 /* two devices of a process may be two ranks */
    CHECK_OK(HcclCommDestroy(third));
    CHECK_OK(aclrtResetDevice(1));
    CHECK_OK(aclrtSetDevice(0));
    CHECK_OK(HcclCommDestroy(first));
    CHECK_OK(try_name("twice", 1, &second));
    char name[128];
    uint32_t number = 9;
    CHECK_OK(HcclGetCommName(second, name));
    CHECK(!strcmp(name, "twice"));
    CHECK_OK(HcclGetRankId(second, &number));
    CHECK_EQ(number, 1);
    CHECK_OK(HcclGetRankSize(second, &number));
    CHECK_EQ(number, 2);
    CHECK_OK(HcclCommDestroy(second));
    CHECK_OK(aclrtResetDevice(0));
}

TEST(test_configurations)
{
    HcclComm comm = NULL;
    char longest[128];
    memset(longest, 'n', sizeof longest);
    longest[127] = 0;
    CHECK_OK(try_name(longest, 0, &comm));
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_ERR(try_name("", 0, &comm), HCCL_E_PARA);
    HcclCommConfig config = named_config(longest);
    config.hcclCommName[127] = 'n';
    CHECK_ERR(HcclCommInitClusterInfoMemConfig(two_ranks, 0, &config, &comm), HCCL_E_PARA);
    config = named_config("magic");
    config.reserved[8] ^= 1;
    CHECK_ERR(HcclCommInitClusterInfoMemConfig(two_ranks, 0, &config, &comm), HCCL_E_PARA);
    config = named_config("short");
    uint64_t sizes[] = { 0, 23, 32, UINT64_MAX };
    for (int i = 0; i < 3; i++) {                           /* too short for a header; too short for a name */
        memcpy(config.reserved, &sizes[i], 8);
        CHECK_ERR(HcclCommInitClusterInfoMemConfig(two_ranks, 0, &config, &comm), HCCL_E_PARA);
    }
    memcpy(config.reserved, &sizes[3], 8);                  /* from the future */
    CHECK_OK(HcclCommInitClusterInfoMemConfig(two_ranks, 0, &config, &comm));
    CHECK_OK(HcclCommDestroy(comm));
}

static void check_rdma(HcclCommConfig *config, uint32_t traffic_class, uint32_t service_level)
{
    HcclComm comm = NULL;
    uint32_t found[2] = { 0, 0 };
    CHECK_OK(HcclCommInitClusterInfoMemConfig(two_ranks, 0, config, &comm));
    CHECK_EQ(softnpu_comm_rdma(comm, &found[0], &found[1]), 0);
    CHECK_EQ(found[0], traffic_class);
    CHECK_EQ(found[1], service_level);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_EQ(softnpu_comm_rdma(comm, &found[0], &found[1]), -1);
}

TEST(test_rdma_is_configured_or_the_environments_or_the_vendors)
{
    HcclCommConfig config = named_config("rdma"), older = config;
    uint32_t version = 4;
    config.hcclRdmaTrafficClass = 64, config.hcclRdmaServiceLevel = 7;
    check_rdma(&config, 64, 7);
    memcpy(older.reserved + 12, &version, sizeof version);  /* these fields came with version 5 */
    check_rdma(&older, 132, 4);
    config.hcclRdmaTrafficClass = HCCL_COMM_TRAFFIC_CLASS_CONFIG_NOT_SET;
    config.hcclRdmaServiceLevel = HCCL_COMM_SERVICE_LEVEL_CONFIG_NOT_SET;
    check_rdma(&config, 132, 4);
    setenv("HCCL_RDMA_TC", "252", 1);
    setenv("HCCL_RDMA_SL", "0", 1);
    check_rdma(&config, 252, 0);
    config.hcclRdmaTrafficClass = 0;
    check_rdma(&config, 0, 0);
    unsetenv("HCCL_RDMA_TC");
    unsetenv("HCCL_RDMA_SL");
}

TEST(test_wrong_rdma_is_refused)
{
    static const char *const classes[] = { "256", "130", "-4", "x" };
    HcclComm comm = NULL;
    HcclCommConfig config = named_config("wrong rdma");
    config.hcclRdmaTrafficClass = 130;                      /* no multiple of 4 */
    CHECK_ERR(HcclCommInitClusterInfoMemConfig(two_ranks, 0, &config, &comm), HCCL_E_PARA);
    config.hcclRdmaTrafficClass = 256;
    CHECK_ERR(HcclCommInitClusterInfoMemConfig(two_ranks, 0, &config, &comm), HCCL_E_PARA);
    config.hcclRdmaTrafficClass = HCCL_COMM_TRAFFIC_CLASS_CONFIG_NOT_SET;
    config.hcclRdmaServiceLevel = 8;
    CHECK_ERR(HcclCommInitClusterInfoMemConfig(two_ranks, 0, &config, &comm), HCCL_E_PARA);
    config.hcclRdmaServiceLevel = 0;
    for (int i = 0; i < 4; i++) {
        setenv("HCCL_RDMA_TC", classes[i], 1);
        CHECK_ERR(HcclCommInitClusterInfoMemConfig(two_ranks, 0, &config, &comm), HCCL_E_PARA);
    }
    unsetenv("HCCL_RDMA_TC");
}

TEST(test_a_destroyed_communicator_is_not_found)
{
    HcclComm comm = new_one_sided("gone", 0);
    HcclResult error;
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_ERR(HcclCommDestroy(comm), HCCL_E_NOT_FOUND);
    CHECK_ERR(prepare(comm, 1), HCCL_E_NOT_FOUND);
    CHECK_ERR(HcclGetCommAsyncError(comm, &error), HCCL_E_NOT_FOUND);
    CHECK_OK(HcclCommDestroy(NULL));
}

TEST(test_suspended_communicators_refuse_transfers)
{
    static char memory[64];
    HcclComm comm = new_one_sided("suspended", 0);
    aclrtStream stream = new_stream();
    HcclOneSideOpDesc desc = { memory, memory, 1, HCCL_DATA_TYPE_INT8 };
    CHECK_OK(HcclCommSuspend(comm));
    CHECK_ERR(HcclBatchGet(comm, 1, &desc, 1, stream), HCCL_E_SUSPENDING);
    CHECK_OK(HcclCommResume(comm));
    CHECK_OK(softnpu_adopt(memory, sizeof memory, 1));
    CHECK_ERR(HcclBatchGet(comm, 1, &desc, 1, stream), HCCL_E_INTERNAL);   /* not prepared: nothing is bound */
    CHECK_OK(softnpu_release(memory, sizeof memory));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(HcclCommDestroy(comm));
}

static void *without_device(void *unused)
{
    HcclComm comm;
    HcclRootInfo info;
    (void)unused;
    CHECK_ERR(HcclGetRootInfo(&info), HCCL_E_RUNTIME);
    CHECK_ERR(try_name("no device", 0, &comm), HCCL_E_RUNTIME);
    return NULL;
}

TEST(test_communicators_want_a_device)
{
    pthread_t thread;
    pthread_create(&thread, NULL, without_device, NULL);
    pthread_join(thread, NULL);
}

TEST(test_groups_are_counted_per_thread)
{
    CHECK_ERR(HcclGroupEnd(), HCCL_E_PARA);
    CHECK_OK(HcclGroupStart());
    CHECK_OK(HcclGroupStart());
    CHECK_OK(HcclGroupEnd());
    CHECK_OK(HcclGroupEnd());
    CHECK_ERR(HcclGroupEnd(), HCCL_E_PARA);
}

TEST(test_error_strings)
{
    for (int code = -3; code < 40; code++)
        CHECK(strlen(HcclGetErrorString((HcclResult)code)) > 3);
    CHECK(!strcmp(HcclGetErrorString(HCCL_E_TIMEOUT), "timeout"));
    CHECK(HcclGetCommConfigCapability() >= 3);              /* the communicator's name, at least */
}

TEST(test_512_unprepared_communicators_hold_no_descriptor)
{
    enum { COUNT = 512 };
    static HcclComm comms[COUNT];
    int before = open_descriptors();
    char name[32];
    for (int i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "many-%d", i);
        CHECK_OK(try_name(name, 0, &comms[i]));
    }
    CHECK_EQ(open_descriptors(), before);
    for (int i = 0; i < COUNT; i++)
        CHECK_OK(HcclCommDestroy(comms[i]));
}

int main(void)
{
    open_device(0);
    RUN(test_the_identical_range_is_the_same_registration);
    RUN(test_known_memory_has_a_type_and_an_end);
    RUN(test_unknown_memory_is_adopted_while_it_is_registered);
    RUN(test_bound_regions_stay_registered);
    RUN(test_names_are_unique_per_device);
    RUN(test_configurations);
    RUN(test_rdma_is_configured_or_the_environments_or_the_vendors);
    RUN(test_wrong_rdma_is_refused);
    RUN(test_a_destroyed_communicator_is_not_found);
    RUN(test_suspended_communicators_refuse_transfers);
    RUN(test_communicators_want_a_device);
    RUN(test_groups_are_counted_per_thread);
    RUN(test_error_strings);
    RUN(test_512_unprepared_communicators_hold_no_descriptor);
    close_device(0);
    return check_done();
}
