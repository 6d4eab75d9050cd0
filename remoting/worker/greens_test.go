package worker

import (
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Work in a green context's stream passes the gate of its device. Resources that the client makes up never reach the
// driver, and a green context ends with its streams and with its device's primary context.
func TestGreenContexts(t *testing.T) {
	const invalidType, invalidValue, invalidContext = 914, 1, 201
	s, g, must := gatedSession(t)

	var resource []byte
	must("resource", func() int32 {
		reply, rc := s.call(opCuDeviceGetDevResource, u32(0), []byte{1}, u32(1))
		resource = append([]byte(nil), reply...)
		return rc
	})
	resource[0] = 1 // the type, which this driver leaves at 0
	s.devres[0]._type = 1
	id := uint32(40)
	describe := func(r []byte) int32 {
		id++
		_, rc := s.call(opCuDevResourceGenerateDesc, u32(id), []byte{1}, u32(1), r, u32(1))
		return rc
	}
	for _, number := range []uint32{0, 2, 1 << 31, ^uint32(0)} {
		forged := cat(resource[:4], u32(number), resource[8:])
		if rc := describe(forged); rc != invalidType {
			t.Errorf("a resource with the number %d: %d", number, rc)
		}
	}
	must("descriptor", func() int32 { return describe(resource) })
	desc, green := id, uint32(100)
	if _, rc := s.call(opCuGreenCtxCreate, u32(green), u32(desc), u32(0), u32(3)); rc != invalidValue {
		t.Errorf("unknown flags: %d", rc)
	}
	must("green context", func() int32 {
		green++
		_, rc := s.call(opCuGreenCtxCreate, u32(green), u32(desc), u32(0), u32(1))
		return rc
	})
	stream := uint32(200)
	must("stream", func() int32 {
		stream++
		_, rc := s.call(opCuGreenCtxStreamCreate, u32(stream), u32(green), u32(1), u32(0))
		return rc
	})
	launch := launchFrame(4)[wire.RequestSize:]
	copy(launch[4:], u32(stream))
	s.hdr.Op = wire.OpLaunch
	given := g.Crossings()
	must("launch", func() int32 { return s.launch(launch) })
	if s.gates.StepOut(); g.Crossings() == given {
		t.Error("a launch in a green context's stream does not pass the gate")
	}
	s.call(opCuGreenCtxDestroy, u32(green))
	if rc := s.launch(launch); rc != invalidHandle {
		t.Errorf("launch in a stream of a green context that was destroyed: %d", rc)
	}
	must("green context", func() int32 {
		green++
		_, rc := s.call(opCuGreenCtxCreate, u32(green), u32(desc), u32(0), u32(1))
		return rc
	})
	s.call(opCuDevicePrimaryCtxReset_v2, u32(0))
	if s.tables[wire.KindGreen].live(green) != nil {
		t.Error("a green context outlives its primary context")
	}
	if s.tables[wire.KindResdesc].live(desc) == nil {
		t.Error("a descriptor ends with a context")
	}
	s.hdr = wire.Request{Op: opCuGreenCtxCreate}
	s.dec.Reset(cat(u32(300), u32(desc), u32(0), u32(1)))
	if rc, _ := s.dispatch(opCuGreenCtxCreate, &s.dec, &s.enc); rc != invalidContext {
		t.Errorf("a green context without its primary context: %d", rc)
	}
	s.gates.Quit()
}
