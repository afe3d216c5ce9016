/* copiers.h: a large copy is shared by several threads, as one is by the engines of a device. */
#pragma once

/* Call `work` in this thread and, if there are idle copiers, in up to `helpers` of them at the same time; return when all calls
 * have. Each takes pieces from a list that `argument` has until there are none left. */
void soft_copiers_run(void (*work)(void *), void *argument, unsigned helpers);
