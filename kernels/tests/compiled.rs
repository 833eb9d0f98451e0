//! What CUDA's own compilers make of the kernels, for every target: nothing spilled, and loads of 16 bytes. No GPU is
//! needed for it.

#[path = "support/tools.rs"]
mod tools;

use std::path::{Path, PathBuf};
use std::process::Command;

use tools::cuda_home;

const TARGETS: [u32; 3] = [80, 90, 100];
const KERNELS: [&str; 3] = ["meridian_entropy_f32", "meridian_entropy_bf16", "meridian_entropy_f16"];

/// Output of one of CUDA's tools, both streams.
fn run(tool: &str, arguments: &[&str]) -> String {
    let bin = cuda_home().join("bin");
    // nvcc looks for its parts on the search path.
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new(bin.join(tool)).args(arguments).env("PATH", path).output().expect("the tool runs");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{tool} {arguments:?}: {said}");
    said
}

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/entropy.cu")
}

/// Machine code for a target, and what ptxas says of it.
fn cubin(name: &str, target: u32, options: &[&str]) -> (PathBuf, String) {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}_{target}.cubin"));
    let (architecture, source) = (format!("-arch=sm_{target}"), source());
    let mut arguments = vec!["-cubin", "-std=c++17", "-Xptxas", "-v", &architecture];
    arguments.extend(["-o", out.to_str().expect("UTF-8"), source.to_str().expect("UTF-8")]);
    arguments.extend(options);
    let said = run("nvcc", &arguments);
    (out, said)
}

/// Registers of a thread of each kernel; what is spilled, or on a stack, must be nothing.
fn registers(said: &str) -> Vec<u32> {
    let kernels = said.matches("Function properties for meridian_entropy").count();
    let clean = said.matches("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads").count();
    assert_eq!((kernels, clean), (3, 3), "{said}");
    let used = said.split("Used ").skip(1).filter_map(|rest| rest.split(' ').next()?.parse().ok());
    used.collect()
}

#[test]
fn nothing_is_spilled() {
    for target in TARGETS {
        let (_, said) = cubin("spilled", target, &[]);
        let used = registers(&said);
        // 5 blocks of 256 threads share 65,536 registers, which are given out by 8 a thread.
        assert!(used.len() == 3 && used.iter().all(|used| *used <= 48), "sm_{target}: {used:?}");
    }
}

/// The loop over a row of bf16 asks for four vectors of 16 bytes before it uses one, and reads the row by nothing else.
#[test]
fn rows_are_read_by_16_bytes() {
    for target in TARGETS {
        let (cubin, _) = cubin("read", target, &[]);
        let sass = run("cuobjdump", &["-sass", cubin.to_str().expect("UTF-8")]);
        for kernel in KERNELS {
            let function =
                sass.split("Function : ").find(|text| text.starts_with(kernel)).expect("the kernel is there");
            let instructions: Vec<&str> = function.lines().filter(|line| line.contains(';')).collect();
            let wide = |line: &str| line.contains("LDG") && line.contains(".128") && line.contains("CONSTANT");
            let first = instructions.iter().position(|line| wide(line)).expect("a wide load");
            let uses = |line: &str| line.contains("MUFU") || line.contains("FFMA");
            let before_use = instructions[first..].iter().take_while(|line| !uses(line)).filter(|line| wide(line));
            assert!(before_use.count() >= 4, "sm_{target}: {kernel}");
            // Those of the loop, and those of its end.
            assert_eq!(instructions.iter().filter(|line| wide(line)).count(), 8, "sm_{target}: {kernel}");
        }
    }
}

/// What checks/gpu looks for a better one among compiles too, for the GPU that it is run on.
#[test]
fn variants_compile() {
    for (unroll, blocks) in [(2, 4), (2, 8), (4, 4), (6, 4), (8, 3)] {
        let options = [format!("-DMERIDIAN_UNROLL={unroll}"), format!("-DMERIDIAN_BLOCKS={blocks}")];
        cubin("variant", 90, &[&options[0], &options[1]]);
    }
}

/// PTX is what a build carries: every kernel, for the right target, and nothing that NVRTC lacks.
#[test]
fn ptx_of_nvcc() {
    for target in TARGETS {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("entropy_{target}.ptx"));
        let architecture = format!("-arch=compute_{target}");
        let paths = [out.to_str().expect("UTF-8").to_owned(), source().to_str().expect("UTF-8").to_owned()];
        run("nvcc", &["-ptx", "-std=c++17", &architecture, "-o", &paths[0], &paths[1]]);
        let ptx = std::fs::read_to_string(&out).expect("PTX");
        assert!(ptx.contains(&format!(".target sm_{target}")), "{target}");
        for kernel in KERNELS {
            let entry = ptx.split(".entry ").find(|text| text.starts_with(kernel)).expect("the kernel is there");
            assert_eq!(entry.matches("ld.global.nc.L1::no_allocate.v4.u32").count(), 8, "{target} {kernel}");
        }
    }
}
