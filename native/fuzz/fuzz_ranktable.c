/* A rank table, as a router or a file of the cluster's operator gives it, and the configuration of a communicator. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "acl.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int is_open;
    if (!is_open) {
        aclInit(NULL);
        aclrtSetDevice(0);
        is_open = 1;
    }
    if (!size)
        return 0;
    char *text = malloc(size);
    if (!text)
        return 0;
    memcpy(text, data + 1, size - 1);
    text[size - 1] = 0;
    HcclCommConfig config;
    configure(&config);
    HcclComm comm = NULL;
    if (HcclCommInitClusterInfoMemConfig(text, data[0] % 4, &config, &comm) == HCCL_SUCCESS)
        HcclCommDestroy(comm);
    free(text);
    return 0;
}
