package worker

// Options of the driver's compiler and linker, and their logs. The buffers of the logs are the worker's: a
// program's pointers mean nothing here, and the driver writes to those that it was given.

/*
#include "driver.h"
#include <stdlib.h>
*/
import "C"

import (
	"bytes"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// maxJITLog bounds the log that a load may ask for, in bytes.
const maxJITLog = 1 << 20

// jitPlain has a bit for each option that is a number, or a log of the worker's.
const jitPlain = 1<<C.CU_JIT_MAX_REGISTERS | 1<<C.CU_JIT_THREADS_PER_BLOCK | 1<<C.CU_JIT_WALL_TIME |
	1<<C.CU_JIT_INFO_LOG_BUFFER | 1<<C.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES |
	1<<C.CU_JIT_ERROR_LOG_BUFFER | 1<<C.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES |
	1<<C.CU_JIT_OPTIMIZATION_LEVEL | 1<<C.CU_JIT_TARGET_FROM_CUCONTEXT | 1<<C.CU_JIT_TARGET |
	1<<C.CU_JIT_FALLBACK_STRATEGY | 1<<C.CU_JIT_GENERATE_DEBUG_INFO | 1<<C.CU_JIT_LOG_VERBOSE |
	1<<C.CU_JIT_GENERATE_LINE_INFO | 1<<C.CU_JIT_CACHE_MODE | 1<<C.CU_JIT_LTO | 1<<C.CU_JIT_FTZ |
	1<<C.CU_JIT_PREC_DIV | 1<<C.CU_JIT_PREC_SQRT | 1<<C.CU_JIT_FMA |
	1<<C.CU_JIT_OPTIMIZE_UNUSED_DEVICE_VARIABLES | 1<<C.CU_JIT_POSITION_INDEPENDENT_CODE |
	1<<C.CU_JIT_MIN_CTA_PER_SM | 1<<C.CU_JIT_MAX_THREADS_PER_BLOCK | 1<<C.CU_JIT_OVERRIDE_DIRECTIVE_VALUES

// jit is the options of a load or of a link state as the driver takes them, in C's memory.
type jit struct {
	n                 int
	opts              *C.uint32_t
	vals              *unsafe.Pointer
	info, errs        unsafe.Pointer
	infoRoom, errRoom uint64 // bytes of the logs
	// Index of what the driver updates: the sizes of the logs, and the time.
	infoAt, errAt, wallAt int
	logs                  bool
}

func (j *jit) free() {
	for _, p := range []unsafe.Pointer{unsafe.Pointer(j.opts), unsafe.Pointer(j.vals), j.info, j.errs} {
		C.free(p)
	}
}

// jitOptions reads n options of the frame that is executed. On an error the options are as none.
func (s *session) jitOptions(n int) (j *jit, rc int32) {
	j = &jit{infoAt: -1, errAt: -1, wallAt: -1}
	j.opts = (*C.uint32_t)(C.calloc(C.size_t(n+1), 4))
	j.vals = (*unsafe.Pointer)(C.calloc(C.size_t(n+1), 8))
	opts := unsafe.Slice((*uint32)(unsafe.Pointer(j.opts)), n)
	vals := unsafe.Slice((*uint64)(unsafe.Pointer(j.vals)), n)
	var seen uint64
	for i := range n {
		var o wire.JITOption
		o.Decode(&s.dec)
		opts[i], vals[i] = o.Option, o.Value
		// Only what carries no pointer of the client's, and each but once: the
		// driver's idea of a log's size must be ours.
		if opts[i] >= 64 || jitPlain>>opts[i]&1 == 0 {
			s.log.Warn("refused: option of a load or of linking not supported", "CUjit_option", opts[i])
			rc = C.CUDA_ERROR_NOT_SUPPORTED
			continue
		}
		if seen>>opts[i]&1 != 0 {
			rc = C.CUDA_ERROR_INVALID_VALUE
		}
		seen |= 1 << opts[i]
		switch opts[i] {
		case C.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
			j.infoAt = i
			vals[i] = min(vals[i]&0xffffffff, maxJITLog)
		case C.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
			j.errAt = i
			vals[i] = min(vals[i]&0xffffffff, maxJITLog)
		case C.CU_JIT_WALL_TIME:
			j.wallAt, j.logs, vals[i] = i, true, 0
		}
	}
	if rc != 0 {
		j.n = 0
		return j, rc
	}
	// Buffers are the worker's: the client's pointers mean nothing here.
	for i := range n {
		switch opts[i] {
		case C.CU_JIT_INFO_LOG_BUFFER:
			if j.infoAt < 0 {
				rc = C.CUDA_ERROR_INVALID_VALUE
				break
			}
			if j.info == nil {
				j.infoRoom = vals[j.infoAt]
				j.info = C.calloc(C.size_t(j.infoRoom+1), 1)
			}
			vals[i] = uint64(uintptr(j.info))
			j.logs = true
		case C.CU_JIT_ERROR_LOG_BUFFER:
			if j.errAt < 0 {
				rc = C.CUDA_ERROR_INVALID_VALUE
				break
			}
			if j.errs == nil {
				j.errRoom = vals[j.errAt]
				j.errs = C.calloc(C.size_t(j.errRoom+1), 1)
			}
			vals[i] = uint64(uintptr(j.errs))
			j.logs = true
		}
	}
	j.n = n
	return j, rc
}

// log gives a log's text, and what the driver has made of its size.
func (j *jit) log(p unsafe.Pointer, at int, room uint64) (text []byte, size uint32) {
	if p == nil || at < 0 {
		return nil, 0
	}
	vals := unsafe.Slice((*uint64)(unsafe.Pointer(j.vals)), j.n)
	text = unsafe.Slice((*byte)(p), room)
	if end := bytes.IndexByte(text, 0); end >= 0 {
		text = text[:end]
	}
	return text, uint32(vals[at])
}

// appendLogs adds what the compiler and the linker said.
func (j *jit) appendLogs(e *wire.Encoder) {
	if !j.logs {
		return
	}
	var m wire.JITLogs
	if j.wallAt >= 0 {
		m.Wall = uint32(unsafe.Slice((*uint64)(unsafe.Pointer(j.vals)), j.n)[j.wallAt])
	}
	info, infoSize := j.log(j.info, j.infoAt, j.infoRoom)
	errs, errSize := j.log(j.errs, j.errAt, j.errRoom)
	m.InfoSize, m.ErrorSize = infoSize, errSize
	m.NInfo, m.NError = uint32(len(info)), uint32(len(errs))
	m.Encode(e)
	e.Bytes(info)
	e.Bytes(errs)
}
