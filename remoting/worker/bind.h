/* What bind needs of C: only a thread itself can drop its capabilities. */
#ifndef SLUICE_BIND_H
#define SLUICE_BIND_H

/* The signal that makes a thread drop its capabilities. */
#define SL_CAPS_SIGNAL 33

/* Takes over that signal for good; 0, or -1 when the C library has no use for it. */
int sl_caps_handler(void);

#endif
