/* copiers.h: shares a large copy among several threads, as a device shares one among its engines. */
#pragma once

/* Calls `work` in this thread and, at the same time, in up to `helpers` idle copiers. Returns once all calls have returned. Each
 * call takes pieces from a list in `argument` until none are left. */
void soft_copiers_run(void (*work)(void *), void *argument, unsigned helpers);
