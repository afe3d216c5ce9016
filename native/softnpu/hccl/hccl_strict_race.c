/* SOFTNPU_STRICT: making a one-sided communicator while another is made or destroyed, anywhere in the process, is a data race in HCCL:
 * both use the process's tables of communicators, and only destroying locks, and only against destroying. A crash there is rare, so
 * here the second call always fails, and is counted. [src hcomm op_base.cc:368-426, 831-912, 3697] */
#include "hccl_soft.h"
#include "runtime.h"

static atomic_int inits, destroys;                      /* threads inside */

static HcclResult race(const char *function)
{
    SOFT_COUNT(races, 1);
    return soft_hccl_error(HCCL_E_INTERNAL, "%s: another thread is making a one-sided communicator, or destroying one while this call "
                           "makes one: HCCL has no lock there, its caller needs one for the whole process", function);
}

HcclResult hccl_strict_init_enter(const char *function)
{
    bool alone = atomic_fetch_add(&inits, 1) == 0 && atomic_load(&destroys) == 0;
    if (alone || !soft_is_strict())
        return HCCL_SUCCESS;
    hccl_strict_init_leave();
    return race(function);
}

void hccl_strict_init_leave(void)
{
    atomic_fetch_sub(&inits, 1);
}

HcclResult hccl_strict_destroy_enter(const char *function)
{
    atomic_fetch_add(&destroys, 1);
    if (atomic_load(&inits) == 0 || !soft_is_strict())
        return HCCL_SUCCESS;
    hccl_strict_destroy_leave();
    return race(function);
}

void hccl_strict_destroy_leave(void)
{
    atomic_fetch_sub(&destroys, 1);
}
