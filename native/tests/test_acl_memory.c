/* Memory: allocation, limits, what a pointer is, adopted and registered ranges. */
#include "gate.h"
#include <sys/mman.h>
#include <sys/resource.h>

enum { PAGE = 4096, MIB = 1 << 20 };

TEST(test_device_memory_is_counted_and_given_back)
{
    softnpu_counters before, during, after;
    size_t free_before, free_now, total;
    softnpu_get_counters(&before);
    CHECK_OK(aclrtGetMemInfo(ACL_HBM_MEM, &free_before, &total));
    CHECK_EQ(total, 1ull << 30);
    char *small = device_bytes(100), *large = device_bytes(5 * MIB);
    CHECK_EQ((uintptr_t)small % 64, 0);
    CHECK_EQ((uintptr_t)large % (2 * MIB), 0);              /* huge pages want it */
    small[0] = small[99] = 1;
    large[5 * MIB - 1] = 1;
    softnpu_get_counters(&during);
    CHECK_EQ(during.device_bytes - before.device_bytes, 100 + 5 * MIB);
    CHECK_EQ(during.allocations - before.allocations, 2);
    CHECK_OK(aclrtGetMemInfo(ACL_HBM_MEM, &free_now, &total));
    CHECK_EQ(free_before - free_now, 100 + 5 * MIB);
    CHECK_OK(aclrtFree(small));
    CHECK_OK(aclrtFree(large));
    CHECK_ERR(aclrtFree(large), ACL_ERROR_RT_PARAM_INVALID);
    softnpu_get_counters(&after);
    CHECK_EQ(after.device_bytes, before.device_bytes);
    CHECK_EQ(after.allocations, before.allocations);
}

TEST(test_fresh_memory_is_where_no_freed_memory_was)
{
    char *first = device_bytes(PAGE);
    CHECK_OK(aclrtFree(first));
    char *second = device_bytes(PAGE);
    CHECK(first != second);
    CHECK_ERR(aclrtMemcpy(first, PAGE, second, PAGE, ACL_MEMCPY_DEVICE_TO_DEVICE), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtFree(second));
}

TEST(test_out_of_memory_is_an_error_with_numbers)
{
    void *device = NULL;
    const char *why;
    CHECK_EQ(aclrtMalloc(&device, (1ull << 30) + 1, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_RT_MEMORY_ALLOCATION);
    why = aclGetRecentErrMsg();
    CHECK(why && strstr(why, "1073741825") && strstr(why, "1073741824"));
    CHECK(device == NULL);
    CHECK_ERR(aclrtMalloc(&device, SIZE_MAX, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_RT_MEMORY_ALLOCATION);
    CHECK_ERR(aclrtMallocHost(&device, SIZE_MAX), ACL_ERROR_RT_MEMORY_ALLOCATION);
    CHECK_ERR(aclrtMallocHost(&device, SIZE_MAX / 2), ACL_ERROR_RT_MEMORY_ALLOCATION);
    CHECK_OK(softnpu_set_memory_limit(1000));
    CHECK_ERR(aclrtMalloc(&device, 1001, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_RT_MEMORY_ALLOCATION);
    CHECK_OK(aclrtMalloc(&device, 1000, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK_OK(aclrtFree(device));
    CHECK_ERR(softnpu_set_memory_limit(0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(softnpu_set_memory_limit(1ull << 30));
}

TEST(test_running_out_of_descriptors_is_out_of_memory)
{
    struct rlimit before, low;
    void *device = NULL;
    getrlimit(RLIMIT_NOFILE, &before);
    low = before;
    low.rlim_cur = 3;
    setrlimit(RLIMIT_NOFILE, &low);
    aclError code = aclrtMalloc(&device, 100, ACL_MEM_MALLOC_HUGE_FIRST);
    setrlimit(RLIMIT_NOFILE, &before);
    const char *why = aclGetRecentErrMsg();
    CHECK_EQ(code, ACL_ERROR_RT_MEMORY_ALLOCATION);
    CHECK(why && strstr(why, "RLIMIT_NOFILE"));
    softnpu_counters counters;
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.device_bytes, 0);
}

TEST(test_pointers_tell_what_they_are)
{
    char *device = device_bytes(3 * MIB), *host = pinned_bytes(100), own[8];
    aclrtPtrAttributes what;
    void *base;
    size_t size;
    CHECK_OK(aclrtPointerGetAttributes(device + 7, &what));
    CHECK_EQ(what.location.type, ACL_MEM_LOCATION_TYPE_DEVICE);
    CHECK_EQ(what.location.id, 0);
    CHECK_EQ(what.pageSize, 2 * MIB);
    CHECK_OK(aclrtPointerGetAttributes(host + 99, &what));
    CHECK_EQ(what.location.type, ACL_MEM_LOCATION_TYPE_HOST);
    CHECK_OK(aclrtPointerGetAttributes(host + 100, &what));
    CHECK_EQ(what.location.type, 2);
    CHECK_OK(aclrtPointerGetAttributes(own, &what));
    CHECK_EQ(what.location.type, 2);
    CHECK_OK(aclrtMemGetAddressRange(device + MIB, &base, &size));
    CHECK(base == device);
    CHECK_EQ(size, 3 * MIB);
    CHECK_ERR(aclrtMemGetAddressRange(host, &base, &size), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtFree(device));
    CHECK_OK(aclrtPointerGetAttributes(device, &what));     /* never to be taken for memory of the host */
    CHECK_EQ(what.location.type, ACL_MEM_LOCATION_TYPE_DEVICE);
    CHECK_OK(aclrtFreeHost(host));
}

TEST(test_memory_goes_back_the_way_it_came)
{
    char *device = device_bytes(64), *host = pinned_bytes(64);
    softnpu_counters counters;
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.pinned_bytes, 64);
    CHECK_ERR(aclrtFree(host), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtFreeHost(device), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtFree(device + 1), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtFree(device));
    CHECK_OK(aclrtFreeHost(host));
}

TEST(test_memset_stays_inside)
{
    char *device = device_bytes(100), own[100];
    CHECK_OK(aclrtMemset(device, 100, 7, 50));
    CHECK_EQ(device[49], 7);
    CHECK_EQ(device[50], 0);
    CHECK_ERR(aclrtMemset(device, 100, 7, 101), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemset(device, 200, 7, 101), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemset(device + 90, 100, 7, 11), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemset(own, 100, 7, 100), ACL_ERROR_RT_INVALID_MEMORY_TYPE);
    CHECK_OK(aclrtFree(device));
}

TEST(test_adopted_memory_is_device_memory)
{
    char *own = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    softnpu_counters counters;
    aclrtPtrAttributes what;
    CHECK_OK(softnpu_adopt(own, 2 * PAGE, 1));
    CHECK_OK(softnpu_adopt(own, 2 * PAGE, 1));
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.adopted, 1);
    CHECK_ERR(softnpu_adopt(own, 2 * PAGE, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(softnpu_adopt(own + PAGE, 2 * PAGE, 1), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(softnpu_adopt(own + PAGE, 1, 1), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(softnpu_adopt(own, 4 * PAGE, 1), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(softnpu_adopt(own + 2 * PAGE, PAGE, 0));
    CHECK_OK(aclrtPointerGetAttributes(own + 1, &what));
    CHECK_EQ(what.location.type, ACL_MEM_LOCATION_TYPE_DEVICE);
    CHECK_OK(aclrtMemset(own, 2 * PAGE, 5, 2 * PAGE));
    CHECK_EQ(own[2 * PAGE - 1], 5);
    CHECK_ERR(softnpu_release(own, PAGE), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(softnpu_release(own, 2 * PAGE));
    CHECK_OK(aclrtMemset(own, 2 * PAGE, 6, 2 * PAGE));      /* one reference is left */
    CHECK_OK(softnpu_release(own, 2 * PAGE));
    CHECK_ERR(aclrtMemset(own, 2 * PAGE, 6, 2 * PAGE), ACL_ERROR_RT_INVALID_MEMORY_TYPE);
    CHECK_ERR(softnpu_release(own, 2 * PAGE), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(softnpu_release(own + 2 * PAGE, PAGE));
    CHECK_ERR(softnpu_adopt(own, PAGE, 2), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(softnpu_adopt(own, 0, 1), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(softnpu_adopt(own, SIZE_MAX, 1), ACL_ERROR_RT_PARAM_INVALID);
    munmap(own, 4 * PAGE);
    CHECK_ERR(softnpu_adopt(own, PAGE, 1), ACL_ERROR_RT_PARAM_INVALID);
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.adopted, 0);
}

TEST(test_registered_host_memory)
{
    char *own = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *kernel_view = NULL, *again = NULL;
    CHECK_ERR(aclrtHostRegister(own + 1, PAGE, ACL_HOST_REGISTER_MAPPED, &kernel_view), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtHostRegister(own, 2 * PAGE, ACL_HOST_REGISTER_MAPPED, &kernel_view));
    CHECK(kernel_view && kernel_view != own);
    CHECK_ERR(aclrtHostRegister(own, 2 * PAGE, ACL_HOST_REGISTER_MAPPED, &again), 507910);
    CHECK_ERR(aclrtHostRegisterV2(own + PAGE, PAGE, ACL_HOST_REG_PINNED), 507910);
    CHECK_OK(aclrtHostGetDevicePointer(own + 5, &again, 0));
    CHECK(again == (char *)kernel_view + 5);
    CHECK_ERR(aclrtHostGetDevicePointer(own, &again, 1), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtHostGetDevicePointer(own + 3 * PAGE, &again, 0), 507911);
    CHECK_ERR(aclrtMemset(kernel_view, PAGE, 0, PAGE), ACL_ERROR_RT_PARAM_INVALID);        /* an address for kernels only */
    CHECK_OK(aclrtHostRegisterV2(own + 2 * PAGE, PAGE, ACL_HOST_REG_PINNED));
    CHECK_ERR(aclrtHostGetDevicePointer(own + 2 * PAGE, &again, 0), 507911);
    CHECK_ERR(aclrtHostRegisterV2(own + 3 * PAGE, PAGE, 1), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtHostRegisterV2(own + 3 * PAGE, PAGE, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtHostUnregister(own));
    CHECK_ERR(aclrtHostUnregister(own), 507911);
    CHECK_OK(aclrtHostUnregister(own + 2 * PAGE));
    munmap(own, 4 * PAGE);
}

TEST(test_many_allocations)
{
    enum { N = 300 };
    static char *kept[N];
    for (int i = 0; i < N; i++) {
        kept[i] = device_bytes((size_t)(i % 7) * 1000 + 1);
        kept[i][0] = (char)i;
    }
    for (int i = 0; i < N; i += 2)
        CHECK_OK(aclrtFree(kept[i]));
    for (int i = 1; i < N; i += 2) {
        void *base = NULL;
        size_t size = 0;
        CHECK_OK(aclrtMemGetAddressRange(kept[i], &base, &size));
        CHECK(base == kept[i] && size == (size_t)(i % 7) * 1000 + 1 && kept[i][0] == (char)i);
        CHECK_OK(aclrtFree(kept[i]));
    }
}

TEST(test_virtual_memory_is_mapped_and_unmapped_in_order)
{
    aclrtPhysicalMemProp prop = { .memAttr = ACL_HBM_MEM_HUGE, .location = { 0, ACL_MEM_LOCATION_TYPE_DEVICE } };
    aclrtDrvMemHandle first, second;
    softnpu_counters counters;
    size_t step = 0;
    char *addr = NULL;
    CHECK_OK(aclrtMemGetAllocationGranularity(&prop, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, &step));
    CHECK_EQ(step, 2 * MIB);
    CHECK_OK(aclrtReserveMemAddress((void **)&addr, 4 * step, 0, NULL, 0));
    CHECK_ERR(aclrtMemset(addr, step, 0, step), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtMallocPhysical(&first, step, &prop, 0));
    CHECK_OK(aclrtMallocPhysical(&second, 2 * step, &prop, 0));
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.device_bytes, 3 * step);
    CHECK_ERR(aclrtMapMem(addr, step, 0, second, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMapMem(addr + PAGE, step, 0, first, 0), ACL_ERROR_RT_ADDR_UNALIGNED);
    CHECK_ERR(aclrtMapMem(addr + 3 * step, 2 * step, 0, second, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtMapMem(addr, step, 0, first, 0));
    CHECK_ERR(aclrtMapMem(addr, step, 0, first, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtMapMem(addr + step, 2 * step, 0, second, 0));
    CHECK_OK(aclrtMapMem(addr + 3 * step, step, 0, first, 0));            /* one memory, two addresses */
    CHECK_OK(aclrtMemset(addr, step, 9, step));
    CHECK_EQ(((volatile char *)addr)[3 * step + 5], 9);
    CHECK_OK(aclrtMemset(addr + step, 2 * step, 4, 2 * step));
    CHECK_ERR(aclrtFreePhysical(first), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtReleaseMemAddress(addr), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtUnmapMem(addr));
    CHECK_ERR(aclrtUnmapMem(addr), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtUnmapMem(addr + step));
    CHECK_OK(aclrtUnmapMem(addr + 3 * step));
    CHECK_ERR(aclrtMemset(addr, step, 0, step), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtMapMem(addr, step, 0, first, 0));         /* contents stay with the physical memory */
    CHECK_EQ(addr[7], 9);
    CHECK_OK(aclrtUnmapMem(addr));
    CHECK_OK(aclrtFreePhysical(first));
    CHECK_OK(aclrtFreePhysical(second));
    CHECK_OK(aclrtReleaseMemAddress(addr));
    CHECK_ERR(aclrtReleaseMemAddress(addr), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtReserveMemAddress((void **)&addr, step + 1, 0, NULL, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtReserveMemAddress((void **)&addr, step, 64, NULL, 0), ACL_ERROR_RT_PARAM_INVALID);
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.device_bytes + counters.allocations, 0);
}

int main(void)
{
    setenv("SOFTNPU_DEVICE_MEMORY", "1073741824", 1);
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    RUN(test_device_memory_is_counted_and_given_back);
    RUN(test_fresh_memory_is_where_no_freed_memory_was);
    RUN(test_out_of_memory_is_an_error_with_numbers);
    RUN(test_running_out_of_descriptors_is_out_of_memory);
    RUN(test_pointers_tell_what_they_are);
    RUN(test_memory_goes_back_the_way_it_came);
    RUN(test_memset_stays_inside);
    RUN(test_adopted_memory_is_device_memory);
    RUN(test_registered_host_memory);
    RUN(test_many_allocations);
    RUN(test_virtual_memory_is_mapped_and_unmapped_in_order);
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
