/* HcclCommPrepare: connect all pairs, show them the bound memory. Blocks the calling thread. Until it has succeeded on
 * every rank nothing is prepared; after a failure it may be called again, and both sides start from fresh links.       */
#include "hccl_soft.h"

static HcclResult connect_and_swap(hccl_comm *comm, const hccl_wait *wait, const hccl_regions *bound)
{
    HcclResult code = hccl_mesh_connect(comm, wait, -1);
    if (!code)
        code = hccl_strict_pages(wait->function, bound);
    if (!code)
        code = hccl_strict_pinned(wait->function, bound);
    for (uint32_t rank = 0; !code && rank < comm->size; rank++)       /* all ranks in one order: no circle of waiting */
        if (rank != comm->rank)
            code = hccl_swap(comm, wait, rank, bound, HCCL_PREPARE);
    if (code)
        hccl_mesh_break(comm, -1);
    return code;
}

static HcclResult prepare(hccl_comm *comm, const hccl_wait *wait)
{
    hccl_regions bound;
    pthread_mutex_lock(&comm->lock);
    bool done = comm->prepared, copied = done || hccl_regions_copy(&comm->bound, &bound);
    pthread_mutex_unlock(&comm->lock);
    if (done)
        return HCCL_SUCCESS;
    if (!copied)
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", wait->function);
    HcclResult code = connect_and_swap(comm, wait, &bound);
    hccl_regions_drop(&bound);
    pthread_mutex_lock(&comm->lock);
    comm->prepared = !code;
    pthread_mutex_unlock(&comm->lock);
    return code;
}

HcclResult HcclCommPrepare(HcclComm handle, const HcclPrepareConfig *prepareConfig, const int timeout)
{
    hccl_comm *comm;
    hccl_wait wait = {__func__, 0, -1};
    HCCL_ENTER();
    if (!prepareConfig)
        return soft_hccl_error(HCCL_E_PTR, "%s: prepareConfig is NULL", __func__);
    if (prepareConfig->topoType != HCCL_TOPO_FULLMESH)
        return soft_hccl_error(HCCL_E_PARA, "%s: topology %d; only HCCL_TOPO_FULLMESH (0) exists", __func__,
                               (int)prepareConfig->topoType);
    HcclResult code = hccl_connect_deadline(__func__, timeout, &wait.deadline);
    if (!code)
        code = hccl_comm_find(__func__, handle, &comm);
    if (code)
        return code;
    code = hccl_setup_begin(comm, &wait);
    if (!code)
        code = hccl_setup_end(comm, &wait, prepare(comm, &wait));
    hccl_comm_put(comm);
    return code;
}
