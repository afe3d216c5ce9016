/* grid.c: expands a grid into ranges, one at a time. */
#include "grid.h"

bool has_range(const ring_grid *g, const cursor *c)
{
    return c->tensor < g->tensors && g->blocks;
}

HcclOneSideOpDesc next_range(const ring_grid *g, cursor *c, uint64_t most)
{
    uint32_t i = c->block, last = g->blocks - 1;
    uint64_t block = i == last ? g->tail : g->bytes, bytes = block - c->offset;
    void *local = (void *)(g->local[c->tensor] + g->local_index[i] * g->local_stride + c->offset);
    void *remote = (void *)(g->remote[c->tensor] + g->remote_index[i] * g->remote_stride + c->offset);
    bool dense = g->bytes == g->local_stride && g->bytes == g->remote_stride;
    while (dense && i < last && bytes < most && g->local_index[i + 1] == g->local_index[i] + 1 &&
           g->remote_index[i + 1] == g->remote_index[i] + 1) {
        i++;
        block = i == last ? g->tail : g->bytes;
        bytes += block;
    }
    uint64_t over = bytes > most ? bytes - most : 0;    /* of the last block; it is where the next range begins */
    c->block = over ? i : i + 1;
    c->offset = over ? block - over : 0;
    if (c->block == g->blocks) {
        c->block = 0;
        c->tensor++;
    }
    return (HcclOneSideOpDesc){.localAddr = local, .remoteAddr = remote, .count = bytes - over, .dataType = HCCL_DATA_TYPE_UINT8};
}
