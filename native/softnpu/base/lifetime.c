/* lifetime.c: whether the runtime lives, from aclInit to the last aclFinalize. init.c decides, everyone may ask. */
#include "runtime.h"

static atomic_bool initialized;

bool soft_initialized(void)
{
    return atomic_load_explicit(&initialized, memory_order_acquire);
}

void soft_initialized_set(bool yes)
{
    /* release: a call that finds the runtime initialised finds the table of devices filled */
    atomic_store_explicit(&initialized, yes, memory_order_release);
}
