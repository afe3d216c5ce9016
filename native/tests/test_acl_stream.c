/* Streams: order, failure modes, aborts, timeouts. */
#include "check.h"

TEST(test_copies_arrive)
{
    aclrtStream stream;
    void *device, *host;
    size_t size = 8 << 20;
    CHECK_OK(aclrtMalloc(&device, size, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK_OK(aclrtMallocHost(&host, size));
    CHECK_OK(aclrtCreateStream(&stream));
    memset(host, 7, size);
    CHECK_OK(aclrtMemcpyAsync(device, size, host, size, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    CHECK_OK(aclrtMemsetAsync(device, size, 9, 100, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(((char *)device)[99], 9);
    CHECK_EQ(((char *)device)[100], 7);
    CHECK_EQ(((char *)device)[size - 1], 7);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
    CHECK_OK(aclrtFreeHost(host));
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    RUN(test_copies_arrive);
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
