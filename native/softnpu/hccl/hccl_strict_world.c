/* SOFTNPU_STRICT: a device has one communicator made from a rank table (HcclCommInitClusterInfo, ..Config) in a process; HCCL takes
 * it for the world that all others are groups of. A second one, also one of another library's, is HCCL_E_UNAVAIL. Those that are
 * made of root info, and one-sided ones, are not limited. [src hcomm op_base.cc:430-447, 1087-1088] */
#include "hccl_soft.h"

static _Atomic uint64_t worlds;                         /* bit n: device n has one */

HcclResult hccl_strict_world_take(const char *function, int device)
{
    uint64_t bit = (uint64_t)1 << device;
    if (!(atomic_fetch_or(&worlds, bit) & bit) || !soft_is_strict())
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_UNAVAIL, "%s: device %d has a communicator made from a rank table in this process already, and "
                           "can have only one", function, device);
}

void hccl_strict_world_give(int device)
{
    atomic_fetch_and(&worlds, ~((uint64_t)1 << device));
}
