//! One expert layer with LoRA, int4 weights in GPTQ's layout, bf16 activations: exported kernels in one CUDA graph.
//!
//! Usage: host EXPORT LIBRARY LAYER
//! EXPORT: a folder of `fanfold export`. LIBRARY: its fanfold_kernels.c as a shared library. LAYER: as examples/c_host
//! writes it; results go to LAYER/outI.bin. Structs and constants are those of fanfold_kernels.h.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr, CString};
use std::fs;
use std::mem::transmute_copy;
use std::path::{Path, PathBuf};
use std::process::exit;
use std::ptr::null_mut;

extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const DTYPE_BF16: i32 = 0;
const FORMAT_GPTQ4_G128: i32 = 0;
const ACTIVATION_NONE: i32 = 0;
const ACTIVATION_SILU: i32 = 1;
const GATE_UP: i32 = 0;
const DOWN: i32 = 1;
const FEW_ROWS: i64 = 512; // up to here the library folds single rows

#[repr(C)]
struct Error {
    status: c_int,
    message: [c_char; 480],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Buffer {
    address: u64,
    bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    expert: i64,
    a: u64,
    b: u64,
    scale: f32,
    rank: i32,
}

#[repr(C)]
struct PlanSort {
    sizes: [i64; 3], // tokens, top_k, experts
    tile: i32,
    topk_ids: Buffer,
    expert_offsets: Buffer,
    sorted_rows: Buffer,
    positions: Buffer,
    work: Buffer,
}

#[repr(C)]
struct GateUp {
    sizes: [i64; 6], // tokens, top_k, experts, outputs, inputs, adapter_slots
    choices: [i32; 4], // dtype, format, activation, tile
    x: Buffer,
    weights: [Buffer; 4], // codes, scales, zeros, global_scales
    y1: Buffer,
    adapter_ids: Buffer,
    work: Buffer,
    sorted_rows: Buffer,
    out: Buffer,
}

#[repr(C)]
struct GatherGateUp {
    sizes: [i64; 6],
    choices: [i32; 3],
    x: Buffer,
    weights: [Buffer; 4],
    y1: Buffer,
    adapter_ids: Buffer,
    topk_ids: Buffer,
    out: Buffer,
}

#[repr(C)]
struct Down {
    sizes: [i64; 5],
    choices: [i32; 3], // dtype, format, tile
    x: Buffer,
    weights: [Buffer; 4],
    work: Buffer,
    sorted_rows: Buffer,
    out: Buffer,
}

#[repr(C)]
struct GatherDown {
    sizes: [i64; 5],
    choices: [i32; 2],
    x: Buffer,
    weights: [Buffer; 4],
    topk_ids: Buffer,
    out: Buffer,
}

#[repr(C)]
struct Order {
    sizes: [i64; 4], // tokens, top_k, experts, adapter_slots
    tile: i32,
    expert_offsets: Buffer,
    sorted_rows: Buffer,
    adapter_ids: Buffer,
    items: Buffer,
    places: Buffer,
    rows_of_places: Buffer,
    unknown: Buffer,
}

#[repr(C)]
struct Fold {
    sizes: [i64; 8], // tokens, top_k, experts, adapter_slots, table_experts, max_rank, outputs, inputs
    choices: [i32; 4], // dtype, projection, activation, tile
    x: Buffer,
    table: Table,
    items: Buffer,
    places: Buffer,
    rows_of_places: Buffer,
    topk_ids: Buffer,
    adapter_ids: Buffer,
    sorted_rows: Buffer,
    unknown: Buffer,
    y: Buffer,
    h: Buffer,
}

#[repr(C)]
struct Combine {
    sizes: [i64; 4], // tokens, top_k, experts, outputs
    dtype: i32,
    y2: Buffer,
    topk_ids: Buffer,
    topk_weights: Buffer,
    out: Buffer,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Table {
    a: Buffer,
    b: Buffer,
    scale: Buffer,
    rank: Buffer,
}

fn fail(message: String) -> ! {
    eprintln!("{message}");
    exit(1)
}

/// A shared library; functions are taken by their C types.
struct Library(*mut c_void);

impl Library {
    fn open(path: &str) -> Library {
        let name = CString::new(path).unwrap();
        let found = unsafe { dlopen(name.as_ptr(), 2) };
        if found.is_null() {
            fail(format!("{path}: can't be loaded"));
        }
        Library(found)
    }

    fn get<F: Copy>(&self, name: &str) -> F {
        let symbol = CString::new(name).unwrap();
        let found = unsafe { dlsym(self.0, symbol.as_ptr()) };
        if found.is_null() {
            fail(format!("no function {name}"));
        }
        unsafe { transmute_copy(&found) }
    }
}

struct Host {
    cuda: Library,
    fanfold: Library,
    kernels: *mut c_void,
    stream: *mut c_void,
}

fn check_cuda(what: &str, code: c_int) {
    if code != 0 {
        fail(format!("{what}: CUDA error {code}"));
    }
}

impl Host {
    fn room(&self, bytes: i64) -> Buffer {
        let mut made = Buffer { address: 0, bytes: bytes as u64 };
        let alloc: unsafe extern "C" fn(*mut u64, usize) -> c_int = self.cuda.get("cuMemAlloc_v2");
        check_cuda("cuMemAlloc", unsafe { alloc(&mut made.address, bytes.max(1) as usize) });
        self.fill(made, 0xff); // NaN, and ids of no expert: nothing stale may be read
        made
    }

    fn fill(&self, buffer: Buffer, value: u8) {
        let fill: unsafe extern "C" fn(u64, u8, usize) -> c_int = self.cuda.get("cuMemsetD8_v2");
        check_cuda("cuMemsetD8", unsafe { fill(buffer.address, value, buffer.bytes as usize) });
    }

    fn upload(&self, address: u64, bytes: &[u8]) {
        let copy: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int = self.cuda.get("cuMemcpyHtoD_v2");
        check_cuda("cuMemcpyHtoD", unsafe { copy(address, bytes.as_ptr().cast(), bytes.len()) });
    }

    fn read_into(&self, buffer: Buffer, path: PathBuf) {
        let bytes = fs::read(&path).unwrap_or_else(|error| fail(format!("{}: {error}", path.display())));
        if bytes.len() as u64 != buffer.bytes {
            fail(format!("{}: expected {} bytes", path.display(), buffer.bytes));
        }
        self.upload(buffer.address, &bytes);
    }

    fn from_file(&self, bytes: i64, path: PathBuf) -> Buffer {
        let made = self.room(bytes);
        self.read_into(made, path);
        made
    }

    fn table(&self, entries: i64) -> Table {
        let made = [8, 8, 4, 4].map(|bytes| self.room(entries * bytes));
        made.iter().for_each(|&buffer| self.fill(buffer, 0)); // no pairs
        Table { a: made[0], b: made[1], scale: made[2], rank: made[3] }
    }

    fn size(&self, name: &str, arguments: [i64; 4]) -> i64 {
        let function: unsafe extern "C" fn(i64, i64, i64, i64) -> i64 = self.fanfold.get(name);
        unsafe { function(arguments[0], arguments[1], arguments[2], arguments[3]) }
    }

    fn check(&self, status: c_int, error: &Error) {
        if status != 0 {
            let name: unsafe extern "C" fn(c_int) -> *const c_char = self.fanfold.get("fanfold_status_name");
            let (name, message) = unsafe { (CStr::from_ptr(name(status)), CStr::from_ptr(error.message.as_ptr())) };
            fail(format!("{}: {}", name.to_string_lossy(), message.to_string_lossy()));
        }
    }

    /// One typed function of the launcher.
    fn call<A>(&self, name: &str, arguments: A) {
        type Typed<A> = unsafe extern "C" fn(*mut c_void, *const A, *mut c_void, *mut Error) -> c_int;
        let function: Typed<A> = self.fanfold.get(name);
        let mut error = Error { status: 0, message: [0; 480] };
        let status = unsafe { function(self.kernels, &arguments, self.stream, &mut error) };
        self.check(status, &error);
    }
}

struct Sizes {
    batches: i64,
    tokens: i64,
    top_k: i64,
    experts: i64,
    hidden: i64,
    intermediate: i64,
    adapter_slots: i64,
    max_rank: i64,
}

fn read_sizes(folder: &Path) -> Sizes {
    let path = folder.join("sizes.txt");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| fail(format!("{}: {error}", path.display())));
    let found: Vec<i64> = text.split_whitespace().skip(1).step_by(2).filter_map(|word| word.parse().ok()).collect();
    let [batches, tokens, top_k, experts, hidden, intermediate, adapter_slots, max_rank] = found[..] else {
        fail(format!("{}: expected 8 sizes", path.display()))
    };
    Sizes { batches, tokens, top_k, experts, hidden, intermediate, adapter_slots, max_rank }
}

struct Layer {
    size: Sizes,
    tile: i32,
    fold_tile: i32,
    x: Buffer,
    ids: Buffer,
    weights: Buffer,
    adapter_ids: Buffer,
    out: Buffer,
    up: [Buffer; 4],
    down: [Buffer; 4],
    up_table: Table,
    down_table: Table,
    offsets: Buffer,
    sorted_rows: Buffer,
    positions: Buffer,
    work: Buffer,
    items: Buffer,
    places: Buffer,
    rows_of_places: Buffer,
    y1: Buffer,
    h: Buffer,
    y2: Buffer,
    unknown: Buffer,
}

impl Layer {
    fn read(host: &Host, folder: &Path) -> Layer {
        let size = read_sizes(folder);
        let (rows, matrix) = (size.tokens * size.top_k, size.experts * size.hidden * size.intermediate);
        let product_tile: unsafe extern "C" fn(c_int, i64, i64) -> i64 = host.fanfold.get("fanfold_product_tile");
        let tile = unsafe { product_tile(DTYPE_BF16, rows, size.experts) };
        let fold_tile = host.size("fanfold_row_tile", [rows, size.experts, size.adapter_slots, 0]);
        let item_count = host.size("fanfold_work_items", [rows, size.experts, size.adapter_slots, fold_tile]);
        let slots = host.size("fanfold_work_slots", [rows, size.experts, tile, 0]);
        let file = |bytes, name: &str| host.from_file(bytes, folder.join(name));
        let none = Buffer::default();
        let entries = size.adapter_slots * size.experts;
        let layer = Layer {
            tile: tile as i32,
            fold_tile: if rows <= FEW_ROWS { 8 } else { fold_tile as i32 },
            x: host.room(2 * size.tokens * size.hidden),
            ids: host.room(4 * rows),
            weights: host.room(4 * rows),
            adapter_ids: host.room(4 * size.tokens),
            out: host.room(2 * size.tokens * size.hidden),
            up: [file(matrix, "gate_up_qweight.bin"), file(4 * (matrix / 128), "gate_up_scales.bin"), none, none],
            down: [file(matrix / 2, "down_qweight.bin"), file(2 * (matrix / 128), "down_scales.bin"), none, none],
            up_table: host.table(2 * entries),
            down_table: host.table(entries),
            offsets: host.room(4 * (size.experts + 1)),
            sorted_rows: host.room(4 * rows),
            positions: host.room(4 * rows),
            work: host.room(16 * slots),
            items: host.room(16 * item_count),
            places: host.room(4 * rows),
            rows_of_places: host.room(4 * rows),
            y1: host.room(4 * rows * size.intermediate),
            h: host.room(2 * rows * size.intermediate),
            y2: host.room(2 * rows * size.hidden),
            unknown: host.room(4),
            size,
        };
        host.fill(layer.unknown, 0);
        layer.read_pairs(host, folder);
        layer
    }

    /// Pairs lie in pairs.bin in the order of pairs.txt: slot, projection (0 gate, 1 up, 2 down), expert, rank, bits of
    /// the scale. A is [padded rank, K], B [N, padded rank].
    fn read_pairs(&self, host: &Host, folder: &Path) {
        let size = &self.size;
        let list = fs::read_to_string(folder.join("pairs.txt")).unwrap_or_else(|error| fail(error.to_string()));
        let data = fs::read(folder.join("pairs.bin")).unwrap_or_else(|error| fail(error.to_string()));
        let mut at = 0;
        let mut rows: Vec<Vec<Entry>> = vec![Vec::new(); 3 * size.adapter_slots as usize];
        for line in list.lines() {
            let fields: Vec<i64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            let [slot, projection, expert, rank, bits] = fields[..] else { fail(format!("pairs.txt: {line}")) };
            let down = projection == 2;
            let inputs = if down { size.intermediate } else { size.hidden };
            let outputs = if down { size.hidden } else { size.intermediate };
            let padded = host.size("fanfold_padded_rank", [rank, 0, 0, 0]);
            let bytes = (2 * padded * (inputs + outputs)) as usize;
            let pair = host.room(bytes as i64);
            host.upload(pair.address, data.get(at..at + bytes).unwrap_or_else(|| fail("pairs.bin: too short".into())));
            at += bytes;
            rows[(projection * size.adapter_slots + slot) as usize].push(Entry {
                expert,
                a: pair.address,
                b: pair.address + (2 * padded * inputs) as u64,
                scale: f32::from_bits(bits as u32),
                rank: rank as i32,
            });
        }
        for (row, entries) in rows.iter().enumerate() {
            let of_up = 2 * size.adapter_slots as usize;
            let (table, place) = if row < of_up { (self.up_table, row) } else { (self.down_table, row - of_up) };
            self.write_entries(host, table, place, entries);
        }
    }

    /// The entries of one projection and slot.
    fn write_entries(&self, host: &Host, table: Table, row: usize, entries: &[Entry]) {
        type Pack = unsafe extern "C" fn(
            *const Entry, i64, i64, *mut u64, *mut u64, *mut f32, *mut i32, *mut i64, *mut Error,
        ) -> c_int;
        let pack: Pack = host.fanfold.get("fanfold_pack_entries");
        let experts = self.size.experts as usize;
        let (mut a, mut b) = (vec![0u64; experts], vec![0u64; experts]);
        let (mut scale, mut rank) = (vec![0f32; experts], vec![0i32; experts]);
        let (mut length, mut error) = (0i64, Error { status: 0, message: [0; 480] });
        let status = unsafe {
            pack(
                entries.as_ptr(), entries.len() as i64, experts as i64, a.as_mut_ptr(), b.as_mut_ptr(),
                scale.as_mut_ptr(), rank.as_mut_ptr(), &mut length, &mut error,
            )
        };
        host.check(status, &error);
        let n = length as usize;
        let place = |buffer: Buffer, bytes: usize| buffer.address + (row * experts * bytes) as u64;
        let bytes64 = |values: &[u64]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
        host.upload(place(table.a, 8), &bytes64(&a[..n]));
        host.upload(place(table.b, 8), &bytes64(&b[..n]));
        host.upload(place(table.scale, 4), &scale[..n].iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>());
        host.upload(place(table.rank, 4), &rank[..n].iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>());
    }

    /// The fold of gate_up (onto y1, and through the activation into h) or of down (onto y2).
    fn fold(&self, host: &Host, projection: i32) {
        let size = &self.size;
        let (up, few) = (projection == GATE_UP, size.tokens * size.top_k <= FEW_ROWS);
        let (outputs, inputs) = if up { (size.intermediate, size.hidden) } else { (size.hidden, size.intermediate) };
        let none = Buffer::default();
        let of_plan = |buffer| if few { none } else { buffer };
        host.call(
            "fanfold_lora_fold",
            Fold {
                sizes: [
                    size.tokens, size.top_k, size.experts, size.adapter_slots, size.experts, size.max_rank, outputs,
                    inputs,
                ],
                choices: [DTYPE_BF16, projection, if up { ACTIVATION_SILU } else { ACTIVATION_NONE }, self.fold_tile],
                x: if up { self.x } else { self.h },
                table: if up { self.up_table } else { self.down_table },
                items: of_plan(self.items),
                places: of_plan(self.places),
                rows_of_places: of_plan(self.rows_of_places),
                topk_ids: self.ids,
                adapter_ids: self.adapter_ids,
                sorted_rows: if size.tokens > 1 { self.sorted_rows } else { none },
                unknown: self.unknown,
                y: if up { self.y1 } else { self.y2 },
                h: if up { self.h } else { none },
            },
        );
    }

    /// What the library launches for this many tokens.
    fn run(&self, host: &Host) {
        let size = &self.size;
        let (t, k, e, h, i) = (size.tokens, size.top_k, size.experts, size.hidden, size.intermediate);
        let (x, weights, y1, adapter_ids, out) = (self.x, self.up, self.y1, self.adapter_ids, self.h);
        let up_sizes = [t, k, e, i, h, size.adapter_slots];
        if t > 1 {
            host.call(
                "fanfold_plan_sort",
                PlanSort {
                    sizes: [t, k, e],
                    tile: self.tile,
                    topk_ids: self.ids,
                    expert_offsets: self.offsets,
                    sorted_rows: self.sorted_rows,
                    positions: self.positions,
                    work: self.work,
                },
            );
            let choices = [DTYPE_BF16, FORMAT_GPTQ4_G128, ACTIVATION_SILU, self.tile];
            let (work, sorted_rows) = (self.work, self.sorted_rows);
            host.call(
                "fanfold_grouped_int4_gate_up",
                GateUp { sizes: up_sizes, choices, x, weights, y1, adapter_ids, work, sorted_rows, out },
            );
        } else {
            let choices = [DTYPE_BF16, FORMAT_GPTQ4_G128, ACTIVATION_SILU];
            host.call(
                "fanfold_grouped_int4_gather_gate_up",
                GatherGateUp { sizes: up_sizes, choices, x, weights, y1, adapter_ids, topk_ids: self.ids, out },
            );
        }
        if t * k > FEW_ROWS {
            host.call(
                "fanfold_lora_order",
                Order {
                    sizes: [t, k, e, size.adapter_slots],
                    tile: self.fold_tile,
                    expert_offsets: self.offsets,
                    sorted_rows: self.sorted_rows,
                    adapter_ids: self.adapter_ids,
                    items: self.items,
                    places: self.places,
                    rows_of_places: self.rows_of_places,
                    unknown: self.unknown,
                },
            );
        }
        self.fold(host, GATE_UP);
        let (sizes, x, weights, out) = ([t, k, e, h, i], self.h, self.down, self.y2);
        if t > 1 {
            let choices = [DTYPE_BF16, FORMAT_GPTQ4_G128, self.tile];
            let (work, sorted_rows) = (self.work, self.sorted_rows);
            host.call("fanfold_grouped_int4_down", Down { sizes, choices, x, weights, work, sorted_rows, out });
        } else {
            let choices = [DTYPE_BF16, FORMAT_GPTQ4_G128];
            let topk_ids = self.ids;
            host.call("fanfold_grouped_int4_gather_down", GatherDown { sizes, choices, x, weights, topk_ids, out });
        }
        self.fold(host, DOWN);
        host.call(
            "fanfold_combine",
            Combine {
                sizes: [t, k, e, h],
                dtype: DTYPE_BF16,
                y2: self.y2,
                topk_ids: self.ids,
                topk_weights: self.weights,
                out: self.out,
            },
        );
    }
}

fn open(export: &str, library: &str) -> Host {
    let cuda = Library::open("libcuda.so.1");
    let init: unsafe extern "C" fn(c_uint) -> c_int = cuda.get("cuInit");
    let device_get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int = cuda.get("cuDeviceGet");
    let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int = cuda.get("cuDevicePrimaryCtxRetain");
    let set_current: unsafe extern "C" fn(*mut c_void) -> c_int = cuda.get("cuCtxSetCurrent");
    let stream_create: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int = cuda.get("cuStreamCreate");
    let (mut device, mut context, mut stream) = (0, null_mut(), null_mut());
    check_cuda("cuInit", unsafe { init(0) });
    check_cuda("cuDeviceGet", unsafe { device_get(&mut device, 0) });
    check_cuda("cuDevicePrimaryCtxRetain", unsafe { retain(&mut context, device) });
    check_cuda("cuCtxSetCurrent", unsafe { set_current(context) });
    check_cuda("cuStreamCreate", unsafe { stream_create(&mut stream, 1) });

    let mut host = Host { cuda, fanfold: Library::open(library), kernels: null_mut(), stream };
    type Open = unsafe extern "C" fn(*const c_char, *mut *mut c_void, *mut Error) -> c_int;
    type LoadAll = unsafe extern "C" fn(*mut c_void, *mut Error) -> c_int;
    let (open, load_all): (Open, LoadAll) = (host.fanfold.get("fanfold_open"), host.fanfold.get("fanfold_load_all"));
    let folder = CString::new(export).unwrap();
    let mut error = Error { status: 0, message: [0; 480] };
    let status = unsafe { open(folder.as_ptr(), &mut host.kernels, &mut error) };
    host.check(status, &error);
    let status = unsafe { load_all(host.kernels, &mut error) }; // no module is loaded while a graph is captured
    host.check(status, &error);
    host
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, export, library, folder] = &arguments[..] else {
        eprintln!("usage: host EXPORT LIBRARY LAYER");
        exit(2)
    };
    let (host, folder) = (open(export, library), Path::new(folder));
    let layer = Layer::read(&host, folder);

    type Begin = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
    type End = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;
    type Instantiate = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, c_ulonglong) -> c_int;
    type Launch = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
    type Download = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int;
    let (begin, end): (Begin, End) = (host.cuda.get("cuStreamBeginCapture_v2"), host.cuda.get("cuStreamEndCapture"));
    let instantiate: Instantiate = host.cuda.get("cuGraphInstantiateWithFlags");
    let launch: Launch = host.cuda.get("cuGraphLaunch");
    let synchronize: unsafe extern "C" fn(*mut c_void) -> c_int = host.cuda.get("cuStreamSynchronize");
    let download: Download = host.cuda.get("cuMemcpyDtoH_v2");
    let close: unsafe extern "C" fn(*mut c_void) = host.fanfold.get("fanfold_close");

    let (mut graph, mut ready) = (null_mut(), null_mut());
    check_cuda("cuStreamBeginCapture", unsafe { begin(host.stream, 0) });
    layer.run(&host);
    check_cuda("cuStreamEndCapture", unsafe { end(host.stream, &mut graph) });
    check_cuda("cuGraphInstantiate", unsafe { instantiate(&mut ready, graph, 0) });
    for batch in 0..layer.size.batches {
        let parts = [
            ("hidden", layer.x),
            ("topk_ids", layer.ids),
            ("topk_weights", layer.weights),
            ("adapter_ids", layer.adapter_ids),
        ];
        for (name, buffer) in parts {
            host.read_into(buffer, folder.join(format!("{name}{batch}.bin")));
        }
        host.fill(layer.out, 0xff);
        check_cuda("cuGraphLaunch", unsafe { launch(ready, host.stream) });
        check_cuda("cuStreamSynchronize", unsafe { synchronize(host.stream) });
        let mut result = vec![0u8; layer.out.bytes as usize];
        let status = unsafe { download(result.as_mut_ptr().cast(), layer.out.address, result.len()) };
        check_cuda("cuMemcpyDtoH", status);
        let path = folder.join(format!("out{batch}.bin"));
        fs::write(&path, result).unwrap_or_else(|error| fail(format!("{}: {error}", path.display())));
    }
    unsafe { close(host.kernels) };
    println!("{} batches of {} tokens", layer.size.batches, layer.size.tokens);
}
