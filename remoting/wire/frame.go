package wire

import (
	"encoding/binary"
	"fmt"
)

// Limits of the format, in bytes.
const (
	// Version of the format; the two sides must agree exactly.
	Version = 1
	// MaxPayload of one frame in either direction.
	MaxPayload = 16 << 20
	// MaxCopyIn is the most data one COPY_IN frame carries.
	MaxCopyIn = 4 << 20
	// DataChunk is the most data the worker puts into one DATA frame.
	DataChunk = 1 << 20
	// MaxWelcome is the largest WELCOME payload.
	MaxWelcome = 1 << 20
	// MaxImage is the largest module image.
	MaxImage = 2 << 30
)

// Sizes of the two frame headers, in bytes.
const (
	RequestSize = 16
	ReplySize   = 24
)

// FlagWait in a request's flags: the client waits for a REPLY.
const FlagWait = 1

// Kinds of frames from worker to client.
const (
	KindReply  = 1
	KindData   = 2
	KindEvent  = 3
	KindError  = 4
	KindPrint  = 5
	KindHostFn = 6
	KindBye    = 7
	KindBeat   = 8
	KindTurn   = 9
)

// DataLast in a DATA frame's arg: the delivery is complete.
const DataLast = 1

// Streams that a PRINT frame's arg names: C's standard output and standard error.
const (
	PrintStdout = 0
	PrintStderr = 1
)

// Control operations; operations below OpControl index the API table.
const (
	OpControl      = 0xF000
	OpCtxActivate  = 0xF000
	OpThreadStream = 0xF001
	OpImageChunk   = 0xF002
	OpImageLoad    = 0xF003
	OpKernelBind   = 0xF004
	OpKernelInfo   = 0xF005
	OpLaunch       = 0xF006
	OpCopyIn       = 0xF007
	OpCopyOut      = 0xF008
	OpCopyIn3D     = 0xF009
	OpCopyOut3D    = 0xF00A
	OpEventWatch   = 0xF00B
	OpHostFnDone   = 0xF00C
	OpLaunchHost   = 0xF00D
	OpObserve      = 0xF00E
	OpBeat         = 0xF00F
	opControlEnd   = 0xF010
)

var controlNames = [...]string{
	"CTX_ACTIVATE", "THREAD_STREAM", "IMAGE_CHUNK", "IMAGE_LOAD", "KERNEL_BIND", "KERNEL_INFO", "LAUNCH", "COPY_IN",
	"COPY_OUT", "COPY_IN_3D", "COPY_OUT_3D", "EVENT_WATCH", "HOSTFN_DONE", "LAUNCH_HOST", "OBSERVE", "BEAT",
}

// ControlName names a control operation for messages.
func ControlName(op uint16) string {
	if op >= OpControl && op < opControlEnd {
		return controlNames[op-OpControl]
	}
	return fmt.Sprintf("operation %#04x", op)
}

// ResultNotInStore is IMAGE_LOAD's result when the image must be uploaded.
const ResultNotInStore = -2

// Handle kinds.
const (
	KindCtx        = 1
	KindStream     = 2
	KindCUEvent    = 3
	KindModule     = 4
	KindLibrary    = 5
	KindKernel     = 6
	KindGraph      = 7
	KindGraphNode  = 8
	KindGraphExec  = 9
	KindMemPool    = 10
	KindArray      = 11
	KindMipmap     = 12
	KindLinkState  = 13
	KindMemHandle  = 14
	KindUserObject = 15
	KindHostFnID   = 16
	KindTexRef     = 17
	NumKinds       = 18
)

// WorkerIndex is the first handle index that the worker chooses; lower ones
// are the client's.
const WorkerIndex = 0x800000

// Request is the header of a frame from client to worker.
type Request struct {
	Size  uint32 // payload bytes
	Op    uint16
	Flags uint16
	Call  uint32 // nonzero iff FlagWait
	Ctx   uint32 // context id current on the calling thread, 0 for none
}

// Decode reads b, which must have RequestSize bytes, and checks it.
func (r *Request) Decode(b *[RequestSize]byte) error {
	r.Size = binary.LittleEndian.Uint32(b[0:])
	r.Op = binary.LittleEndian.Uint16(b[4:])
	r.Flags = binary.LittleEndian.Uint16(b[6:])
	r.Call = binary.LittleEndian.Uint32(b[8:])
	r.Ctx = binary.LittleEndian.Uint32(b[12:])
	switch {
	case r.Size > MaxPayload:
		return fmt.Errorf("wire: %s frame of %d bytes: the limit is %d: %w", ControlName(r.Op), r.Size, MaxPayload, ErrRange)
	case r.Flags&^FlagWait != 0:
		return fmt.Errorf("wire: %s frame has unknown flags %#x", ControlName(r.Op), r.Flags)
	case (r.Flags&FlagWait != 0) != (r.Call != 0):
		return fmt.Errorf("wire: %s frame has call %d but flags %#x", ControlName(r.Op), r.Call, r.Flags)
	}
	return nil
}

// Encode writes the header to b.
func (r *Request) Encode(b *[RequestSize]byte) {
	binary.LittleEndian.PutUint32(b[0:], r.Size)
	binary.LittleEndian.PutUint16(b[4:], r.Op)
	binary.LittleEndian.PutUint16(b[6:], r.Flags)
	binary.LittleEndian.PutUint32(b[8:], r.Call)
	binary.LittleEndian.PutUint32(b[12:], r.Ctx)
}

// Reply is the header of a frame from worker to client.
type Reply struct {
	Size     uint32 // payload bytes; set by the writer
	Kind     uint16
	Op       uint16
	Call     uint32
	Result   int32
	Arg      uint32
	Deferred int32 // first failed one-way call not reported yet, else 0
}

// Encode writes the header to b.
func (r *Reply) Encode(b *[ReplySize]byte) {
	binary.LittleEndian.PutUint32(b[0:], r.Size)
	binary.LittleEndian.PutUint16(b[4:], r.Kind)
	binary.LittleEndian.PutUint16(b[6:], r.Op)
	binary.LittleEndian.PutUint32(b[8:], r.Call)
	binary.LittleEndian.PutUint32(b[12:], uint32(r.Result))
	binary.LittleEndian.PutUint32(b[16:], r.Arg)
	binary.LittleEndian.PutUint32(b[20:], uint32(r.Deferred))
}

// Decode reads b and checks the size.
func (r *Reply) Decode(b *[ReplySize]byte) error {
	r.Size = binary.LittleEndian.Uint32(b[0:])
	r.Kind = binary.LittleEndian.Uint16(b[4:])
	r.Op = binary.LittleEndian.Uint16(b[6:])
	r.Call = binary.LittleEndian.Uint32(b[8:])
	r.Result = int32(binary.LittleEndian.Uint32(b[12:]))
	r.Arg = binary.LittleEndian.Uint32(b[16:])
	r.Deferred = int32(binary.LittleEndian.Uint32(b[20:]))
	if r.Size > MaxPayload {
		return fmt.Errorf("wire: frame of kind %d has %d bytes: the limit is %d: %w", r.Kind, r.Size, MaxPayload, ErrRange)
	}
	return nil
}
