package worker

// Flags and attributes that clients may give: only those that are known here, because a
// value of an unknown one may be an address or a handle to the driver.

/*
#include "driver.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// ctxFlags are those of cuCtxCreate. Core dumps are files of the worker's.
const (
	ctxFlags  = C.CU_CTX_SCHED_MASK | C.CU_CTX_MAP_HOST | C.CU_CTX_LMEM_RESIZE_TO_MAX | C.CU_CTX_SYNC_MEMOPS
	dumpFlags = C.CU_CTX_COREDUMP_ENABLE | C.CU_CTX_USER_COREDUMP_ENABLE
)

// flagsOK is the error for a context's flags, 0 if they are good.
func (s *session) flagsOK(flags uint32) int32 {
	switch {
	case flags&^(ctxFlags|dumpFlags) != 0:
		return C.CUDA_ERROR_INVALID_VALUE
	case flags&dumpFlags != 0:
		return s.refuse("core dumps of contexts")
	}
	return 0
}

// launchPlain has a bit for each attribute of a launch whose value is numbers, or an address
// that kernels use; launchEvents for those that name an event. streamPlain and nodePlain are
// those of a stream and of a kernel node.
const (
	launchPlain = 1<<C.CU_LAUNCH_ATTRIBUTE_IGNORE | 1<<C.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW |
		1<<C.CU_LAUNCH_ATTRIBUTE_COOPERATIVE | 1<<C.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY |
		1<<C.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION | 1<<C.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE |
		1<<C.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION | 1<<C.CU_LAUNCH_ATTRIBUTE_PRIORITY |
		1<<C.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP | 1<<C.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN |
		1<<C.CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION | 1<<C.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT |
		1<<C.CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING
	launchEvents = 1<<C.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT | 1<<C.CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT
	streamPlain  = 1<<C.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW | 1<<C.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY |
		1<<C.CU_LAUNCH_ATTRIBUTE_PRIORITY | 1<<C.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP | 1<<C.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN
	nodePlain = 1<<C.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW | 1<<C.CU_LAUNCH_ATTRIBUTE_COOPERATIVE |
		1<<C.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION | 1<<C.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE |
		1<<C.CU_LAUNCH_ATTRIBUTE_PRIORITY | 1<<C.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP | 1<<C.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN |
		1<<C.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
)

// in reports whether an attribute has a bit in a set.
func in(set uint64, id uint32) bool { return id < 64 && set>>id&1 != 0 }

// refuseAttr refuses an attribute by its number. All beyond the sets share one name, as every
// name is remembered.
func (s *session) refuseAttr(of string, id uint32) int32 {
	if id < 64 {
		return s.refuse(fmt.Sprintf("attribute %d of a %s", id, of))
	}
	return s.refuse("unknown attributes of a " + of)
}

// launchAttrs checks the attributes of a launch, and puts real handles into them in place. It
// returns the ids of the events that the launch records, those before a bad attribute too.
func (s *session) launchAttrs(p []byte) (events []uint32, rc int32) {
	for ; len(p) > 0; p = p[wire.LaunchAttrSize:] {
		a := (*C.struct_wire_launch_attr)(unsafe.Pointer(&p[0]))
		id := uint32(a.id)
		switch {
		case in(launchPlain, id):
		case in(launchEvents, id):
			ev := (*uint64)(unsafe.Pointer(&a.value))
			real, ok := s.handle(wire.KindEvent, uint32(*ev))
			if !ok {
				return events, s.badHandle(wire.KindEvent, uint32(*ev))
			}
			events = append(events, uint32(*ev))
			*ev = real
		default:
			return events, s.refuseAttr("launch", id)
		}
	}
	return events, 0
}

// configAttrs checks the attributes of a launch that is only asked about. Events do not
// matter there, and are left out.
func (s *session) configAttrs(attrs []C.CUlaunchAttribute) int32 {
	for i := range attrs {
		switch id := uint32(attrs[i].id); {
		case in(launchPlain, id):
		case in(launchEvents, id):
			attrs[i].id = C.CU_LAUNCH_ATTRIBUTE_IGNORE
		default:
			return s.refuseAttr("launch", id)
		}
	}
	return 0
}

func (s *session) cuStreamSetAttribute(h href, attr uint32, v *C.CUstreamAttrValue) C.CUresult {
	if !in(streamPlain, attr) {
		return C.CUresult(s.refuseAttr("stream", attr))
	}
	if v == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	return C.call_cuStreamSetAttribute(C.uint64_t(h.real), C.uint32_t(attr), v)
}

func (s *session) cuStreamGetAttribute(h href, attr uint32, v *C.CUstreamAttrValue) C.CUresult {
	if !in(streamPlain, attr) {
		return C.CUresult(s.refuseAttr("stream", attr))
	}
	return C.call_cuStreamGetAttribute(C.uint64_t(h.real), C.uint32_t(attr), v)
}
