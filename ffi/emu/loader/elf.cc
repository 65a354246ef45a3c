#include "loader/elf.h"

#include <elf.h>
#include <sys/mman.h>

#include <cinttypes>
#include <cstring>
#include <vector>

#include "core/error.h"

namespace emu {
namespace {

size_t align_up(size_t value, size_t alignment) { return (value + alignment - 1) / alignment * alignment; }

// The object's own numbers are not to be trusted: every access goes through `at`.
class Reader {
 public:
  Reader(const uint8_t* data, size_t bytes) : data_(data), bytes_(bytes) {
    header_ = at<Elf64_Ehdr>(0, 1);
    if (std::memcmp(header_->e_ident, ELFMAG, SELFMAG) != 0 || header_->e_ident[EI_CLASS] != ELFCLASS64 ||
        header_->e_machine != EM_X86_64 || header_->e_type != ET_REL)
      throw fail("host object: not a relocatable x86-64 ELF file");
    if (header_->e_shentsize != sizeof(Elf64_Shdr)) throw fail("host object: odd section header size");
    sections_ = at<Elf64_Shdr>(header_->e_shoff, header_->e_shnum);
  }
  template <class T>
  const T* at(uint64_t offset, uint64_t count) const {
    if (offset > bytes_ || count > (bytes_ - offset) / sizeof(T)) throw fail("host object: truncated or damaged");
    if (offset % alignof(T)) throw fail("host object: misaligned table");
    return reinterpret_cast<const T*>(data_ + offset);
  }
  unsigned section_count() const { return header_->e_shnum; }
  const Elf64_Shdr& section(unsigned i) const {
    if (i >= header_->e_shnum) throw fail("host object: section %u of %u", i, header_->e_shnum);
    return sections_[i];
  }
  std::string text(const Elf64_Shdr& table, uint32_t offset) const {
    const char* begin = at<char>(table.sh_offset, table.sh_size);
    if (offset >= table.sh_size) throw fail("host object: name outside its table");
    return std::string(begin + offset, strnlen(begin + offset, table.sh_size - offset));
  }

 private:
  const uint8_t* data_;
  size_t bytes_;
  const Elf64_Ehdr* header_;
  const Elf64_Shdr* sections_;
};

template <class T>
void store(uint8_t* place, uint64_t value) {
  const T narrow = static_cast<T>(value);
  std::memcpy(place, &narrow, sizeof narrow);
}

// Where the sections, the table of addresses (GOT) and the jumps to external functions lie in the linked image.
struct Image {
  uint8_t* memory;
  std::vector<uint8_t*> section;         // null: not loaded
  std::vector<uint64_t> symbol_address;  // of the symbol table's entries
  uint64_t* got;                         // one entry a symbol
  uint8_t* plt;                          // 16 bytes a symbol: jmp *got[i]
};

void relocate(const Image& image, uint8_t* place, const Elf64_Rela& rela, uint8_t* place_end) {
  const uint32_t type = ELF64_R_TYPE(rela.r_info);
  const uint64_t index = ELF64_R_SYM(rela.r_info);
  if (index >= image.symbol_address.size()) throw fail("host object: relocation of symbol %" PRIu64, index);
  const uint64_t s = image.symbol_address[index], a = static_cast<uint64_t>(rela.r_addend);
  const uint64_t p = reinterpret_cast<uint64_t>(place), got = reinterpret_cast<uint64_t>(image.got);
  const uint64_t entry = reinterpret_cast<uint64_t>(image.got + index);
  const uint64_t jump = reinterpret_cast<uint64_t>(image.plt + 16 * index);
  const bool wide = type == R_X86_64_64 || type == R_X86_64_PC64 || type == R_X86_64_GOT64 ||
                    type == R_X86_64_GOTOFF64 || type == R_X86_64_GOTPC64 || type == R_X86_64_GOTPCREL64 ||
                    type == R_X86_64_PLTOFF64;
  if (place_end - place < (wide ? 8 : 4)) throw fail("host object: relocation outside its section");
  switch (type) {
    case R_X86_64_64: return store<uint64_t>(place, s + a);
    case R_X86_64_PC64: return store<uint64_t>(place, s + a - p);
    case R_X86_64_GOT64: return store<uint64_t>(place, entry - got + a);
    case R_X86_64_GOTOFF64: return store<uint64_t>(place, s + a - got);
    case R_X86_64_GOTPC64: return store<uint64_t>(place, got + a - p);
    case R_X86_64_GOTPCREL64: return store<uint64_t>(place, entry + a - p);
    case R_X86_64_PLTOFF64: return store<uint64_t>(place, jump + a - got);
    case R_X86_64_PC32: return store<uint32_t>(place, s + a - p);
    case R_X86_64_PLT32: return store<uint32_t>(place, jump + a - p);
    case R_X86_64_GOTPCREL:
    case R_X86_64_GOTPCRELX:
    case R_X86_64_REX_GOTPCRELX: return store<uint32_t>(place, entry + a - p);
  }
  throw fail("host object: relocation type %u is not known", type);
}

}  // namespace

LinkedObject::LinkedObject(const uint8_t* object, size_t bytes, const SymbolResolver& resolve) {
  const Reader reader(object, bytes);
  const unsigned count = reader.section_count();
  const Elf64_Shdr* symbol_table = nullptr;
  std::vector<size_t> offset(count, SIZE_MAX);
  size_t total = 0;
  for (unsigned i = 0; i < count; ++i) {
    const Elf64_Shdr& s = reader.section(i);
    if (s.sh_type == SHT_SYMTAB) symbol_table = &s;
    if (!(s.sh_flags & SHF_ALLOC)) continue;
    if (s.sh_size > (size_t{1} << 30) || s.sh_addralign > 4096) throw fail("host object: a section is too large");
    total = align_up(total, std::max<size_t>(s.sh_addralign, 16));
    offset[i] = total;
    total += s.sh_size;
  }
  if (!symbol_table) throw fail("host object: no symbol table");
  const uint64_t symbol_count = symbol_table->sh_size / sizeof(Elf64_Sym);
  const Elf64_Sym* table = reader.at<Elf64_Sym>(symbol_table->sh_offset, symbol_count);
  const Elf64_Shdr& names = reader.section(symbol_table->sh_link);

  const size_t got_offset = align_up(total, 64);
  const size_t plt_offset = got_offset + 8 * symbol_count;
  bytes_ = align_up(plt_offset + 16 * symbol_count, 4096);
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw fail("host object: no memory for %zu bytes", bytes_);
  memory_ = static_cast<uint8_t*>(mapped);
  try {
    Image image{memory_, std::vector<uint8_t*>(count, nullptr), {}, nullptr, memory_ + plt_offset};
    image.got = reinterpret_cast<uint64_t*>(memory_ + got_offset);
    for (unsigned i = 0; i < count; ++i) {
      if (offset[i] == SIZE_MAX) continue;
      const Elf64_Shdr& s = reader.section(i);
      image.section[i] = memory_ + offset[i];
      if (s.sh_type != SHT_NOBITS)
        std::memcpy(image.section[i], reader.at<uint8_t>(s.sh_offset, s.sh_size), s.sh_size);
    }
    for (uint64_t i = 0; i < symbol_count; ++i) {
      const Elf64_Sym& symbol = table[i];
      const std::string name = reader.text(names, symbol.st_name);
      uint64_t address = 0;
      if (symbol.st_shndx == SHN_UNDEF) {
        if (name == "_GLOBAL_OFFSET_TABLE_") address = reinterpret_cast<uint64_t>(image.got);
        else if (!name.empty()) address = reinterpret_cast<uint64_t>(resolve(name));
      } else if (symbol.st_shndx == SHN_ABS) {
        address = symbol.st_value;
      } else if (symbol.st_shndx < count && image.section[symbol.st_shndx]) {
        uint8_t* place = image.section[symbol.st_shndx] + symbol.st_value;
        address = reinterpret_cast<uint64_t>(place);
        if (ELF64_ST_BIND(symbol.st_info) != STB_LOCAL) symbols_[name] = place;
      }
      image.symbol_address.push_back(address);
      image.got[i] = address;
      const uint8_t jump[6] = {0xff, 0x25, 0, 0, 0, 0};  // jmp *disp32(%rip)
      uint8_t* stub = image.plt + 16 * i;
      std::memcpy(stub, jump, sizeof jump);
      store<uint32_t>(stub + 2, reinterpret_cast<uint64_t>(&image.got[i]) - reinterpret_cast<uint64_t>(stub + 6));
    }
    for (unsigned i = 0; i < count; ++i) {
      const Elf64_Shdr& s = reader.section(i);
      if (s.sh_type == SHT_REL) throw fail("host object: relocations without addends");
      if (s.sh_type != SHT_RELA || s.sh_info >= count || !image.section[s.sh_info]) continue;
      const uint64_t entries = s.sh_size / sizeof(Elf64_Rela);
      const Elf64_Rela* rela = reader.at<Elf64_Rela>(s.sh_offset, entries);
      const Elf64_Shdr& target = reader.section(s.sh_info);
      for (uint64_t r = 0; r < entries; ++r) {
        if (rela[r].r_offset >= target.sh_size) throw fail("host object: relocation outside its section");
        uint8_t* base = image.section[s.sh_info];
        relocate(image, base + rela[r].r_offset, rela[r], base + target.sh_size);
      }
    }
    // Code, tables and data share pages, so all of them are executable; the image is private to this process.
    if (mprotect(memory_, bytes_, PROT_READ | PROT_WRITE | PROT_EXEC)) throw fail("host object: mprotect failed");
  } catch (...) {
    munmap(memory_, bytes_);
    throw;
  }
}

LinkedObject::~LinkedObject() {
  if (memory_) munmap(memory_, bytes_);
}

void* LinkedObject::symbol(const std::string& name) const {
  const auto found = symbols_.find(name);
  return found == symbols_.end() ? nullptr : found->second;
}

std::string LinkedObject::find(const std::string& prefix, const std::string& suffix) const {
  std::string result;
  for (const auto& [name, address] : symbols_) {
    if (name.size() < prefix.size() + suffix.size() || name.compare(0, prefix.size(), prefix) != 0) continue;
    if (name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0) result = name;
  }
  return result;
}

}  // namespace emu
