/* What the programs here share. */
#ifndef AIODATADIST_FUZZ_H
#define AIODATADIST_FUZZ_H

#include <stdint.h>
#include <string.h>
#include "hccl.h"

static inline void configure(HcclCommConfig *config)
{
    uint64_t size = 300;
    uint32_t head[2] = {HCCL_COMM_CONFIG_MAGIC_WORD, 5};
    memset(config, 0, sizeof *config);
    memcpy(config->reserved, &size, sizeof size);
    memcpy(config->reserved + 8, head, sizeof head);
    memcpy(config->hcclCommName, "fuzz", 5);
}

#endif
