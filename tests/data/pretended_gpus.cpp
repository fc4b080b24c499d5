// Devices "cuda" that do nothing, for fake tensors in a build of torch without CUDA: indexing asks for the device.
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
