/* A descriptor of memory, as a peer sends it: nothing that it says is followed. */
#include <stdint.h>
#include <string.h>
#include "acl.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char table[] = "{\"server_list\":[{\"server_id\":\"a\",\"device\":[{\"device_id\":\"0\",\"rank_id\":\"0\"},"
    "{\"device_id\":\"1\",\"rank_id\":\"1\"}]}]}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static HcclComm comm;
    static char memory[4096];
    if (!comm) {
        HcclCommConfig config;
        aclInit(NULL);
        aclrtSetDevice(0);
        configure(&config);
        if (HcclCommInitClusterInfoMemConfig(table, 0, &config, &comm) != HCCL_SUCCESS)
            __builtin_trap();
    }
    HcclMemDesc mine, foreign;
    CommMem there;
    memset(&foreign, 0, sizeof foreign);
    memset(&mine, 0, sizeof mine);
    int has_mine = size && data[0] % 2 && HcclRegisterMem(comm, 1, COMM_MEM_TYPE_HOST, memory, sizeof memory, &mine) == HCCL_SUCCESS;
    foreign = mine;                                     /* a true one, of which a part is changed */
    if (size > 1) {
        size_t at = data[1], length = size - 2 < sizeof foreign - at ? size - 2 : sizeof foreign - at;
        memcpy((char *)&foreign + at, data + 2, length);
    }
    if (HcclEnableMemAccess(comm, &foreign, &there) == HCCL_SUCCESS)
        HcclDisableMemAccess(comm, &foreign);
    HcclDeregisterMem(comm, &foreign);
    if (has_mine)
        HcclDeregisterMem(comm, &mine);
    return 0;
}
