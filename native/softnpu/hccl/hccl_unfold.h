/* hccl_unfold.h: a communicator whose batches are unfolded on the device (SOFTNPU_STRICT=aicpu), as HCCL does on an A3 by default.
 * A batch is a kernel on the caller's stream. The kernel gives the copies to the communicator's own stream, and one notify of
 * the communicator reports the end of each batch to whichever stream waits for it:
 *
 *     caller's stream   kernel ──> wait for the notify ──>
 *     own stream           └─> copies of the batch, set the notify
 *
 * So an abort of the caller's stream stops no copy that its kernel has started, and of two streams either may consume the
 * notify that the other's batch set. The items of a call stand in one buffer of the communicator until its kernel is launched:
 * two calls at once mix theirs. [src hccl_one_sided_service.cc:336-348, 520-550, 1021-1060, 1168-1239, 1286;
 * aicpu_one_side_service.cc:341-380]                                                                                   */
#pragma once
#include "hccl_soft.h"
#include "runtime.h"

typedef struct hccl_unfolding hccl_unfolding;

HcclResult hccl_unfolding_of(const char *function, hccl_comm *comm, soft_stream *caller, hccl_unfolding **out); /* a reference */
void       hccl_unfolding_put(hccl_unfolding *unfolding);   /* or NULL */
void       hccl_unfolding_note(hccl_unfolding *unfolding, uint32_t number, const hccl_copy *copy);      /* item of a call */
/* Launches the kernel of a call of `count` noted items; `transfer`, which has none, is taken over. */
HcclResult hccl_unfolding_launch(hccl_unfolding *unfolding, hccl_transfer *transfer, uint32_t count, soft_stream *caller);
void       hccl_unfolding_drain(hccl_unfolding *unfolding); /* or NULL: waits for its stream, for HCCL_EXEC_TIMEOUT at most */
void       hccl_unfolding_end(hccl_unfolding *unfolding);   /* or NULL: nothing of it moves when this has returned */
