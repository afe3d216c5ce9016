/* Registrations are not counted. [src hcomm global_mem_manager.cc Reg, DeReg] */
#include "strict_kit.h"

static void uncounted(void)
{
    void *memory, *first = NULL, *second = NULL, *third = NULL;
    CHECK_OK(aclrtMalloc(&memory, LENT, ACL_MEM_MALLOC_HUGE_FIRST));
    CommMem mem = { COMM_MEM_TYPE_DEVICE, memory, LENT };
    CHECK_OK(HcclRegisterGlobalMem(&mem, &first));
    CHECK_OK(HcclRegisterGlobalMem(&mem, &second));
    CHECK(first == second);
    CHECK_OK(HcclDeregisterGlobalMem(first));               /* for both */
    CHECK_ERR(HcclDeregisterGlobalMem(second), HCCL_E_PARA);
    CHECK_OK(HcclRegisterGlobalMem(&mem, &third));
    CHECK_OK(HcclDeregisterGlobalMem(third));
    CHECK_ERR(HcclDeregisterGlobalMem((void *)0x1234), HCCL_E_PARA);
    CHECK_OK(aclrtFree(memory));
}

TEST(test_one_deregistration_ends_a_range_for_all)
{
    run_alone("hccs", uncounted);
    run_alone("roce", uncounted);
}

static void bound(void)
{
    static const char table[] = "{\"version\": \"1.0\", \"status\": \"completed\", \"server_list\": [{\"server_id\": \"a\", \"device\": ["
                                "{\"device_id\": \"0\", \"device_ip\": \"10.0.0.1\", \"rank_id\": \"0\"}]}]}";
    HcclCommConfig config = named_config("bound");
    void *memory, *first = NULL, *second = NULL;
    HcclComm comm;
    CHECK_OK(aclrtMalloc(&memory, LENT, ACL_MEM_MALLOC_HUGE_FIRST));
    CommMem mem = { COMM_MEM_TYPE_DEVICE, memory, LENT };
    CHECK_OK(HcclCommInitClusterInfoMemConfig(table, 0, &config, &comm));
    CHECK_OK(HcclRegisterGlobalMem(&mem, &first));
    CHECK_OK(HcclCommBindMem(comm, first));
    CHECK_OK(HcclRegisterGlobalMem(&mem, &second));
    CHECK_ERR(HcclDeregisterGlobalMem(second), HCCL_E_PARA);      /* still bound: counted, this would only be one less */
    CHECK_OK(HcclCommUnbindMem(comm, first));
    CHECK_OK(HcclDeregisterGlobalMem(second));
    CHECK_ERR(HcclCommBindMem(comm, first), HCCL_E_NOT_FOUND);
    CHECK_OK(HcclCommDestroy(comm));
    CHECK_OK(aclrtFree(memory));
}

TEST(test_a_bound_range_cannot_be_deregistered)
{
    run_alone("hccs", bound);
}

int main(void)
{
    RUN(test_one_deregistration_ends_a_range_for_all);
    RUN(test_a_bound_range_cannot_be_deregistered);
    return check_done();
}
