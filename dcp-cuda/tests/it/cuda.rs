//! A CUDA device, where there is one; where there is none, the error that says so.

use std::sync::{Arc, RwLock};

use dcp_core::error::error_chain;
use dcp_cuda::{CudaDevice, CudaError, CudaMemory, PinnedStaging};
use dcp_testing::block_on;

use crate::copies::noise;

#[test]
fn bytes_come_back_from_a_device_or_its_absence_is_an_error() {
    let device = match CudaDevice::open(0) {
        Ok(device) => device,
        Err(error) => {
            let missing = matches!(
                error,
                CudaError::NoLibrary { .. }
                    | CudaError::NoFunction { .. }
                    | CudaError::NoDevice { .. }
                    | CudaError::Driver { .. }
            );
            let text = error_chain(&error);
            assert!(missing && text.contains("CUDA"), "{text}");
            println!("SKIPPED: {text}");
            return;
        }
    };
    let stream = device.context().default_stream();
    let slice = Arc::new(RwLock::new(stream.alloc_zeros::<f32>(300_000).unwrap()));
    let staging = PinnedStaging::builder(device).lent_bytes(1 << 20).build();
    let memory = staging.memory(CudaMemory::new(Arc::clone(&slice)));
    let (len, whole) = (1_200_000, noise(1_200_000));
    assert_eq!(memory.byte_len(), len);
    // Through chunks, and through the area.
    block_on(memory.write(&[0..len], whole.clone().into())).unwrap();
    assert_eq!(block_on(memory.read(&[0..len])).unwrap(), whole);
    let ranges = [4..8, 100..70_000, len - 1..len];
    let part = noise(4 + 69_900 + 1);
    let pinned = memory.staging(part.len()).unwrap();
    pinned.lend(0..part.len()).unwrap().copy_from_slice(&part);
    block_on(memory.write(&ranges, pinned.read().unwrap())).unwrap();
    assert_eq!(block_on(memory.read(&ranges)).unwrap(), part);
    // The stream of the trainer sees what was written.
    let elements = stream.clone_dtoh(&*slice.read().unwrap()).unwrap();
    assert_eq!(elements[1].to_le_bytes(), part[..4]);
    let beyond = block_on(memory.read(&[len - 1..len + 1])).unwrap_err();
    assert!(error_chain(&*beyond).contains("does not fit"), "{}", error_chain(&*beyond));
}
