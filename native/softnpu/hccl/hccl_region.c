/* Memory of this process that may be shown to peers. A range is registered once per process and bound to communicators.
 * Registering the identical range again gives the same handle and counts; each registration wants its deregistration.
 * HCCL does not count those of HcclRegisterGlobalMem, and so it is with SOFTNPU_STRICT: one deregistration ends the range for
 * all, and the next is HCCL_E_PARA, as is any unknown handle. [src hcomm global_mem_manager.cc Reg, DeReg]              */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "care.h"
#include "hccl_soft.h"
#include "runtime.h"

#ifndef MADV_POPULATE_WRITE                             /* Linux 5.14; older C libraries do not name it */
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE                                   /* Linux 6.1 */
#define MADV_COLLAPSE 25
#endif

#define DEVICE_BYTES_MAX ((uint64_t)64 << 30)           /* the vendor's limits for one registration */
#define HOST_BYTES_MAX   ((uint64_t)1 << 40)
#define POPULATE_MAX     ((uint64_t)256 << 20)          /* more is looked after behind the call: not all of it may ever be used */

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static hccl_region *table;
static uint64_t last_id;

static HcclResult check_range(const char *function, const CommMem *mem)
{
    uint64_t limit = mem->type == COMM_MEM_TYPE_DEVICE ? DEVICE_BYTES_MAX : HOST_BYTES_MAX;
    if (mem->type != COMM_MEM_TYPE_DEVICE && mem->type != COMM_MEM_TYPE_HOST)
        return soft_hccl_error(HCCL_E_PARA, "%s: memory type %d is neither device (0) nor host (1)", function,
                               (int)mem->type);
    if (!mem->addr)
        return soft_hccl_error(HCCL_E_PTR, "%s: addr is NULL", function);
    if (mem->size == 0 || mem->size > limit || (uintptr_t)mem->addr > UINTPTR_MAX - mem->size)
        return soft_hccl_error(HCCL_E_PARA, "%s: %llu bytes at %p: must be 1 to %llu", function,
                               (unsigned long long)mem->size, mem->addr, (unsigned long long)limit);
    return HCCL_SUCCESS;
}

static int placement_of(const CommMem *mem)
{
    return mem->type == COMM_MEM_TYPE_DEVICE ? 1 : 0;
}

/* Under table_lock. The registered range that shares a byte with this one. */
static hccl_region *overlapping(const CommMem *mem)
{
    uintptr_t from = (uintptr_t)mem->addr;
    for (hccl_region *region = table; region; region = region->next) {
        uintptr_t start = (uintptr_t)region->mem.addr;
        if (from < start + region->mem.size && start < from + mem->size)
            return region;
    }
    return NULL;
}

static HcclResult know(const char *function, const CommMem *mem, bool *adopted)
{
    soft_span span;
    *adopted = !soft_span_of(mem->addr, mem->size, &span);
    if (*adopted)
        return soft_mem_adopt(mem->addr, mem->size, placement_of(mem)) ? HCCL_E_PARA : HCCL_SUCCESS;
    if (span.placement == placement_of(mem))
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_PARA, "%s: %p is %s memory", function, mem->addr, span.placement ? "device" : "host");
}

static void region_free(soft_object *object)
{
    free(object);
}

static HcclResult create(const char *function, const CommMem *mem, hccl_region **region)
{
    bool adopted;
    HcclResult code = know(function, mem, &adopted);
    if (code)
        return code;
    hccl_region *made = calloc(1, sizeof *made);
    if (made) {
        made->object.destroy = region_free;
        atomic_init(&made->object.refs, 1);
        made->handle = soft_handle_new(SOFT_REGION, &made->object);
    }
    if (!made || !made->handle) {
        free(made);
        if (adopted)
            soft_mem_release(mem->addr, mem->size);
        return soft_hccl_error(HCCL_E_MEMORY, "%s: no room for another registration", function);
    }
    made->id = ++last_id;
    made->mem = *mem;
    made->adopted = adopted;
    made->next = table;
    *region = table = made;
    return HCCL_SUCCESS;
}

HcclResult hccl_region_acquire(const char *function, const CommMem *mem, hccl_region **region)
{
    HcclResult code = check_range(function, mem);
    if (code)
        return code;
    pthread_mutex_lock(&table_lock);
    hccl_region *found = overlapping(mem);
    if (!found)
        code = create(function, mem, &found);
    else if (found->mem.addr != mem->addr || found->mem.size != mem->size || found->mem.type != mem->type)
        code = soft_hccl_error(HCCL_E_PARA, "%s: %llu bytes at %p overlap the registered %llu bytes at %p", function,
                               (unsigned long long)mem->size, mem->addr, (unsigned long long)found->mem.size, found->mem.addr);
    if (!code) {
        found->registrations++;
        soft_ref(&found->object);
        *region = found;
    }
    pthread_mutex_unlock(&table_lock);
    return code;
}

static void unlink_region(hccl_region *region)
{
    hccl_region **at = &table;
    while (*at != region)
        at = &(*at)->next;
    *at = region->next;
    soft_care_end(SOFT_ENLARGE, (uintptr_t)region->mem.addr);
    if (region->adopted)
        soft_mem_release(region->mem.addr, region->mem.size);
    if (soft_handle_remove(SOFT_REGION, region->handle))
        soft_unref(&region->object);
}

HcclResult hccl_region_release(const char *function, hccl_region *region)
{
    HcclResult code = HCCL_SUCCESS;
    pthread_mutex_lock(&table_lock);
    if (region->registrations == 0)
        code = soft_hccl_error(HCCL_E_NOT_FOUND, "%s: the region was deregistered by another thread", function);
    else if (region->registrations == 1 && region->bindings)
        code = soft_hccl_error(HCCL_E_PARA, "%s: the region is still bound to %u communicators", function,
                               region->bindings);
    else if (--region->registrations == 0)
        unlink_region(region);
    pthread_mutex_unlock(&table_lock);
    return code;
}

bool hccl_region_bind(hccl_region *region)
{
    pthread_mutex_lock(&table_lock);
    bool registered = region->registrations > 0;
    if (registered) {
        region->bindings++;
        soft_ref(&region->object);
    }
    pthread_mutex_unlock(&table_lock);
    return registered;
}

void hccl_region_unbind(hccl_region *region)
{
    pthread_mutex_lock(&table_lock);
    region->bindings--;
    pthread_mutex_unlock(&table_lock);
    soft_unref(&region->object);
}

/* process_vm_readv looks up and pins each page: 1 GB of pages of 4 KiB took 0.20 to 0.26 s of an EPYC (Zen 4), and of 2 MiB 0.07
 * s in blocks of 256 KiB and 0.16 in blocks of 16. Whole ones within the range; where no page is there yet nothing is moved,
 * hence the first of each. Advice: no setting of the mapping changes, and what is under MADV_NOHUGEPAGE, or pinned by a
 * driver, stays as it is. Moving 256 MiB takes 0.1 to 0.5 s, the more the more scattered the machine's free memory is.    */
static void use_huge_pages(uintptr_t from, uintptr_t end)
{
    uintptr_t first = soft_round_up(from, SOFT_HUGE_PAGE);     /* below `from` where that would be behind the last address */
    for (uintptr_t at = first; first >= from && at < end && end - at >= SOFT_HUGE_PAGE; at += SOFT_HUGE_PAGE)
        madvise((void *)at, 1, MADV_POPULATE_WRITE);
    madvise((void *)from, end - from, MADV_COLLAPSE);
}

/* A NIC's registration pins memory, too. Fresh pages cost 0.5 to 1.6 s per GiB: here, or in the first transfers. Advice:
 * read-only memory stays as it is, and a kernel that does not know it populates by use. Where there is no page to be had the
 * first transfer would be SIGBUS.                                                                                     */
static HcclResult populate(const char *function, const CommMem *mem)
{
    soft_span span;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)mem->addr, from = start / page * page;
    if (mem->size > POPULATE_MAX || start + mem->size < start)
        return HCCL_SUCCESS;
    if (!soft_span_of(mem->addr, mem->size, &span) || span.fd < 0)     /* of the caller's, known from its first registration on */
        use_huge_pages(from, start + mem->size);
    if (madvise((void *)from, start + mem->size - from, MADV_POPULATE_WRITE) == 0 || errno != EFAULT)
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_MEMORY, "%s: [%p, +%llu) has pages for which there is no memory: its file is shorter, or its file "
                           "system, /dev/shm perhaps, is full", function, mem->addr, (unsigned long long)mem->size);
}

/* The caller's memory that populate() leaves alone, because it is large. */
static void look_after(const CommMem *mem)
{
    soft_span span;
    if (mem->size > POPULATE_MAX && soft_span_of(mem->addr, mem->size, &span) && span.fd < 0)
        soft_care_begin(SOFT_ENLARGE, (uintptr_t)mem->addr, mem->size);
}

static void count_once(hccl_region *region)
{
    pthread_mutex_lock(&table_lock);
    if (region->global && soft_is_strict())
        region->registrations--;
    region->global = true;
    pthread_mutex_unlock(&table_lock);
}

HcclResult HcclRegisterGlobalMem(const CommMem *mem, void **memHandle)
{
    hccl_region *region;
    HCCL_ENTER();
    if (!mem || !memHandle)
        return soft_hccl_error(HCCL_E_PTR, "%s: %s is NULL", __func__, mem ? "memHandle" : "mem");
    HcclResult code = populate(__func__, mem);
    if (!code)
        code = hccl_region_acquire(__func__, mem, &region);
    if (code)
        return code;
    look_after(mem);
    count_once(region);
    *memHandle = region->handle;
    soft_unref(&region->object);
    return HCCL_SUCCESS;
}

static HcclResult end_global(const char *function, hccl_region *region)
{
    pthread_mutex_lock(&table_lock);
    bool ended = soft_is_strict() && !region->global;       /* what is left of it is HcclRegisterMem's */
    pthread_mutex_unlock(&table_lock);
    if (ended)
        return soft_hccl_error(HCCL_E_PARA, "%s: the region was deregistered before", function);
    HcclResult code = hccl_region_release(function, region);
    pthread_mutex_lock(&table_lock);
    region->global &= code || !soft_is_strict();
    pthread_mutex_unlock(&table_lock);
    return code;
}

HcclResult HcclDeregisterGlobalMem(void *memHandle)
{
    HCCL_ENTER();
    if (!memHandle)
        return soft_hccl_error(HCCL_E_PTR, "%s: memHandle is NULL", __func__);
    hccl_region *region = soft_handle_get(SOFT_REGION, memHandle);
    if (!region)
        return soft_hccl_error(soft_is_strict() ? HCCL_E_PARA : HCCL_E_NOT_FOUND, "%s: %p is not a registered region, or no longer", __func__, memHandle);
    HcclResult code = end_global(__func__, region);
    soft_unref(&region->object);
    return code;
}
