// Behaviour of the ECP5 cells for which Yosys has no model: what Yosys and our RTL use of them.
//
// Ports and parameters are among those of Yosys's declarations (`techlibs/lattice`). DP16KD reads,
// writes and resets as `brams_16kd.txt` tells Yosys that it does, with pins and contents as
// `brams_map_16kd.v` connects them; MULT18X18D gives the product that `dsp_map_18x18.v` takes from
// it, and nothing that Yosys makes uses its registers. None of it is checked against Lattice's
// models or a device: where RTL and netlist agree, synthesis agrees with these models. A parameter
// that is not modelled names a module that does not exist, so that no simulator builds it.

// A register of MULT18X18D that its parameters may leave out.
module nearstep_mult18_register #(
    parameter WIDTH = 1,
    parameter CLOCK = "NONE",
    parameter ENABLE = "CE0",
    parameter RESET = "RST0",
    parameter RESETMODE = "SYNC"
) (
    input [3:0] clk, input [3:0] ce, input [3:0] rst, input [WIDTH-1:0] d, output [WIDTH-1:0] q
);
  generate
    if (CLOCK == "NONE") begin : through
      assign q = d;
    end else begin : held
      wire c = CLOCK == "CLK0" ? clk[0] : CLOCK == "CLK1" ? clk[1]
             : CLOCK == "CLK2" ? clk[2] : clk[3];
      wire e = ENABLE == "CE0" ? ce[0] : ENABLE == "CE1" ? ce[1]
             : ENABLE == "CE2" ? ce[2] : ce[3];
      wire r = RESET == "RST0" ? rst[0] : RESET == "RST1" ? rst[1]
             : RESET == "RST2" ? rst[2] : rst[3];
      reg [WIDTH-1:0] state = 0;
      if (RESETMODE == "ASYNC") begin : asynchronous
        always @(posedge c or posedge r)
          if (r) state <= 0;
          else if (e) state <= d;
      end else begin : synchronous
        always @(posedge c)
          if (r) state <= 0;
          else if (e) state <= d;
      end
      assign q = state;
    end
  endgenerate
endmodule

// 18 x 18 bits, signed or not, with a register before, within and behind, each if asked for.
// The shift inputs (SOURCEA, SOURCEB) are not modelled: the product is unknown with them.
module MULT18X18D #(
    parameter REG_INPUTA_CLK = "NONE", parameter REG_INPUTA_CE = "CE0", parameter REG_INPUTA_RST
    = "RST0", parameter REG_INPUTB_CLK = "NONE", parameter REG_INPUTB_CE = "CE0", parameter
    REG_INPUTB_RST = "RST0", parameter REG_INPUTC_CLK = "NONE", parameter REG_INPUTC_CE = "CE0",
    parameter REG_INPUTC_RST = "RST0", parameter REG_PIPELINE_CLK = "NONE", parameter
    REG_PIPELINE_CE = "CE0", parameter REG_PIPELINE_RST = "RST0", parameter REG_OUTPUT_CLK =
    "NONE", parameter REG_OUTPUT_CE = "CE0", parameter REG_OUTPUT_RST = "RST0", parameter
    CLK0_DIV = "ENABLED", parameter CLK1_DIV = "ENABLED", parameter CLK2_DIV = "ENABLED",
    parameter CLK3_DIV = "ENABLED", parameter HIGHSPEED_CLK = "NONE", parameter GSR = "ENABLED",
    parameter CAS_MATCH_REG = "FALSE", parameter SOURCEB_MODE = "B_SHIFT", parameter MULT_BYPASS
    = "DISABLED", parameter RESETMODE = "SYNC"
) (
    input A17, input A16, input A15, input A14, input A13, input A12, input A11, input A10,
    input A9, input A8, input A7, input A6, input A5, input A4, input A3, input A2, input A1,
    input A0, input B17, input B16, input B15, input B14, input B13, input B12, input B11, input
    B10, input B9, input B8, input B7, input B6, input B5, input B4, input B3, input B2, input
    B1, input B0, input C17, input C16, input C15, input C14, input C13, input C12, input C11,
    input C10, input C9, input C8, input C7, input C6, input C5, input C4, input C3, input C2,
    input C1, input C0, input SIGNEDA, input SIGNEDB, input SOURCEA, input SOURCEB, input CLK3,
    input CLK2, input CLK1, input CLK0, input CE3, input CE2, input CE1, input CE0, input RST3,
    input RST2, input RST1, input RST0, output P35, output P34, output P33, output P32, output
    P31, output P30, output P29, output P28, output P27, output P26, output P25, output P24,
    output P23, output P22, output P21, output P20, output P19, output P18, output P17, output
    P16, output P15, output P14, output P13, output P12, output P11, output P10, output P9,
    output P8, output P7, output P6, output P5, output P4, output P3, output P2, output P1,
    output P0
);
  wire [3:0] clk = {CLK3, CLK2, CLK1, CLK0};
  wire [3:0] ce = {CE3, CE2, CE1, CE0};
  wire [3:0] rst = {RST3, RST2, RST1, RST0};
  wire [18:0] a, b;
  nearstep_mult18_register #(
      .WIDTH(19), .CLOCK(REG_INPUTA_CLK), .ENABLE(REG_INPUTA_CE), .RESET(REG_INPUTA_RST),
      .RESETMODE(RESETMODE)
  ) input_a (.clk(clk), .ce(ce), .rst(rst), .q(a), .d({SIGNEDA & A17,
      A17, A16, A15, A14, A13, A12, A11, A10, A9, A8, A7, A6, A5, A4, A3, A2, A1, A0}));
  nearstep_mult18_register #(
      .WIDTH(19), .CLOCK(REG_INPUTB_CLK), .ENABLE(REG_INPUTB_CE), .RESET(REG_INPUTB_RST),
      .RESETMODE(RESETMODE)
  ) input_b (.clk(clk), .ce(ce), .rst(rst), .q(b), .d({SIGNEDB & B17,
      B17, B16, B15, B14, B13, B12, B11, B10, B9, B8, B7, B6, B5, B4, B3, B2, B1, B0}));
  wire signed [37:0] product = $signed(a) * $signed(b);
  wire [35:0] known = SOURCEA | SOURCEB ? 36'bx : product[35:0];
  wire [35:0] middle, p;
  nearstep_mult18_register #(
      .WIDTH(36), .CLOCK(REG_PIPELINE_CLK), .ENABLE(REG_PIPELINE_CE), .RESET(REG_PIPELINE_RST),
      .RESETMODE(RESETMODE)
  ) pipeline (.clk(clk), .ce(ce), .rst(rst), .d(known), .q(middle));
  nearstep_mult18_register #(
      .WIDTH(36), .CLOCK(REG_OUTPUT_CLK), .ENABLE(REG_OUTPUT_CE), .RESET(REG_OUTPUT_RST),
      .RESETMODE(RESETMODE)
  ) outside (.clk(clk), .ce(ce), .rst(rst), .d(middle), .q(p));
  assign {
      P35, P34, P33, P32, P31, P30, P29, P28, P27, P26, P25, P24, P23, P22, P21, P20, P19, P18,
      P17, P16, P15, P14, P13, P12, P11, P10, P9, P8, P7, P6, P5, P4, P3, P2, P1, P0
  } = p;
  generate
    if (MULT_BYPASS != "DISABLED" || HIGHSPEED_CLK != "NONE" || CAS_MATCH_REG != "FALSE")
      parameter_of_MULT18X18D_is_not_modelled fault();
  endgenerate
endmodule

// 18 Kib of memory with two ports; a port of 36 bits takes the data pins of both.
//
// Bytes have nine bits; ports of 1, 2 and 4 bits see eight of each. Enables of bytes are the low
// bits of the address of ports of 18 and 36 bits. A port writes nothing in a
// synchronous reset.
module DP16KD #(
    parameter DATA_WIDTH_A = 18, parameter REGMODE_A = "NOREG", parameter CSDECODE_A = "0b000",
    parameter WRITEMODE_A = "NORMAL", parameter CLKAMUX = "CLKA", parameter DATA_WIDTH_B = 18,
    parameter REGMODE_B = "NOREG", parameter CSDECODE_B = "0b000", parameter WRITEMODE_B =
    "NORMAL", parameter CLKBMUX = "CLKB", parameter RESETMODE = "SYNC", parameter
    ASYNC_RESET_RELEASE = "SYNC", parameter GSR = "ENABLED", parameter WID = 0, parameter
    INIT_DATA = "STATIC", parameter [319:0] INITVAL_00 = 320'h0, parameter [319:0] INITVAL_01 =
    320'h0, parameter [319:0] INITVAL_02 = 320'h0, parameter [319:0] INITVAL_03 = 320'h0,
    parameter [319:0] INITVAL_04 = 320'h0, parameter [319:0] INITVAL_05 = 320'h0, parameter
    [319:0] INITVAL_06 = 320'h0, parameter [319:0] INITVAL_07 = 320'h0, parameter [319:0]
    INITVAL_08 = 320'h0, parameter [319:0] INITVAL_09 = 320'h0, parameter [319:0] INITVAL_0A =
    320'h0, parameter [319:0] INITVAL_0B = 320'h0, parameter [319:0] INITVAL_0C = 320'h0,
    parameter [319:0] INITVAL_0D = 320'h0, parameter [319:0] INITVAL_0E = 320'h0, parameter
    [319:0] INITVAL_0F = 320'h0, parameter [319:0] INITVAL_10 = 320'h0, parameter [319:0]
    INITVAL_11 = 320'h0, parameter [319:0] INITVAL_12 = 320'h0, parameter [319:0] INITVAL_13 =
    320'h0, parameter [319:0] INITVAL_14 = 320'h0, parameter [319:0] INITVAL_15 = 320'h0,
    parameter [319:0] INITVAL_16 = 320'h0, parameter [319:0] INITVAL_17 = 320'h0, parameter
    [319:0] INITVAL_18 = 320'h0, parameter [319:0] INITVAL_19 = 320'h0, parameter [319:0]
    INITVAL_1A = 320'h0, parameter [319:0] INITVAL_1B = 320'h0, parameter [319:0] INITVAL_1C =
    320'h0, parameter [319:0] INITVAL_1D = 320'h0, parameter [319:0] INITVAL_1E = 320'h0,
    parameter [319:0] INITVAL_1F = 320'h0, parameter [319:0] INITVAL_20 = 320'h0, parameter
    [319:0] INITVAL_21 = 320'h0, parameter [319:0] INITVAL_22 = 320'h0, parameter [319:0]
    INITVAL_23 = 320'h0, parameter [319:0] INITVAL_24 = 320'h0, parameter [319:0] INITVAL_25 =
    320'h0, parameter [319:0] INITVAL_26 = 320'h0, parameter [319:0] INITVAL_27 = 320'h0,
    parameter [319:0] INITVAL_28 = 320'h0, parameter [319:0] INITVAL_29 = 320'h0, parameter
    [319:0] INITVAL_2A = 320'h0, parameter [319:0] INITVAL_2B = 320'h0, parameter [319:0]
    INITVAL_2C = 320'h0, parameter [319:0] INITVAL_2D = 320'h0, parameter [319:0] INITVAL_2E =
    320'h0, parameter [319:0] INITVAL_2F = 320'h0, parameter [319:0] INITVAL_30 = 320'h0,
    parameter [319:0] INITVAL_31 = 320'h0, parameter [319:0] INITVAL_32 = 320'h0, parameter
    [319:0] INITVAL_33 = 320'h0, parameter [319:0] INITVAL_34 = 320'h0, parameter [319:0]
    INITVAL_35 = 320'h0, parameter [319:0] INITVAL_36 = 320'h0, parameter [319:0] INITVAL_37 =
    320'h0, parameter [319:0] INITVAL_38 = 320'h0, parameter [319:0] INITVAL_39 = 320'h0,
    parameter [319:0] INITVAL_3A = 320'h0, parameter [319:0] INITVAL_3B = 320'h0, parameter
    [319:0] INITVAL_3C = 320'h0, parameter [319:0] INITVAL_3D = 320'h0, parameter [319:0]
    INITVAL_3E = 320'h0, parameter [319:0] INITVAL_3F = 320'h0
) (
    input DIA17, input DIA16, input DIA15, input DIA14, input DIA13, input DIA12, input DIA11,
    input DIA10, input DIA9, input DIA8, input DIA7, input DIA6, input DIA5, input DIA4, input
    DIA3, input DIA2, input DIA1, input DIA0, input ADA13, input ADA12, input ADA11, input
    ADA10, input ADA9, input ADA8, input ADA7, input ADA6, input ADA5, input ADA4, input ADA3,
    input ADA2, input ADA1, input ADA0, input CEA, input OCEA, input CLKA, input WEA, input
    RSTA, input CSA2, input CSA1, input CSA0, output DOA17, output DOA16, output DOA15, output
    DOA14, output DOA13, output DOA12, output DOA11, output DOA10, output DOA9, output DOA8,
    output DOA7, output DOA6, output DOA5, output DOA4, output DOA3, output DOA2, output DOA1,
    output DOA0, input DIB17, input DIB16, input DIB15, input DIB14, input DIB13, input DIB12,
    input DIB11, input DIB10, input DIB9, input DIB8, input DIB7, input DIB6, input DIB5, input
    DIB4, input DIB3, input DIB2, input DIB1, input DIB0, input ADB13, input ADB12, input ADB11,
    input ADB10, input ADB9, input ADB8, input ADB7, input ADB6, input ADB5, input ADB4, input
    ADB3, input ADB2, input ADB1, input ADB0, input CEB, input OCEB, input CLKB, input WEB,
    input RSTB, input CSB2, input CSB1, input CSB0, output DOB17, output DOB16, output DOB15,
    output DOB14, output DOB13, output DOB12, output DOB11, output DOB10, output DOB9, output
    DOB8, output DOB7, output DOB6, output DOB5, output DOB4, output DOB3, output DOB2, output
    DOB1, output DOB0
);
  reg [8:0] memory [0:2047];
  localparam [20479:0] INIT = {
      INITVAL_3F, INITVAL_3E, INITVAL_3D, INITVAL_3C, INITVAL_3B, INITVAL_3A, INITVAL_39,
      INITVAL_38, INITVAL_37, INITVAL_36, INITVAL_35, INITVAL_34, INITVAL_33, INITVAL_32,
      INITVAL_31, INITVAL_30, INITVAL_2F, INITVAL_2E, INITVAL_2D, INITVAL_2C, INITVAL_2B,
      INITVAL_2A, INITVAL_29, INITVAL_28, INITVAL_27, INITVAL_26, INITVAL_25, INITVAL_24,
      INITVAL_23, INITVAL_22, INITVAL_21, INITVAL_20, INITVAL_1F, INITVAL_1E, INITVAL_1D,
      INITVAL_1C, INITVAL_1B, INITVAL_1A, INITVAL_19, INITVAL_18, INITVAL_17, INITVAL_16,
      INITVAL_15, INITVAL_14, INITVAL_13, INITVAL_12, INITVAL_11, INITVAL_10, INITVAL_0F,
      INITVAL_0E, INITVAL_0D, INITVAL_0C, INITVAL_0B, INITVAL_0A, INITVAL_09, INITVAL_08,
      INITVAL_07, INITVAL_06, INITVAL_05, INITVAL_04, INITVAL_03, INITVAL_02, INITVAL_01,
      INITVAL_00
  };
  integer i;
  initial
    for (i = 0; i < 1024; i = i + 1) begin
      memory[2 * i] = INIT[20 * i +: 9];
      memory[2 * i + 1] = INIT[20 * i + 9 +: 9];
    end

  wire [13:0] address_a = {
      ADA13, ADA12, ADA11, ADA10, ADA9, ADA8, ADA7, ADA6, ADA5, ADA4, ADA3, ADA2, ADA1, ADA0
  };
  wire [35:0] data_a = {
      DIB17, DIB16, DIB15, DIB14, DIB13, DIB12, DIB11, DIB10, DIB9, DIB8, DIB7, DIB6, DIB5,
      DIB4, DIB3, DIB2, DIB1, DIB0, DIA17, DIA16, DIA15, DIA14, DIA13, DIA12, DIA11, DIA10,
      DIA9, DIA8, DIA7, DIA6, DIA5, DIA4, DIA3, DIA2, DIA1, DIA0
  };
  wire clock_a = CLKAMUX == "INV" ? ~CLKA : CLKA;
  reg [35:0] out_a = 0;

  wire [13:0] address_b = {
      ADB13, ADB12, ADB11, ADB10, ADB9, ADB8, ADB7, ADB6, ADB5, ADB4, ADB3, ADB2, ADB1, ADB0
  };
  wire [35:0] data_b = {
      18'h0, DIB17, DIB16, DIB15, DIB14, DIB13, DIB12, DIB11, DIB10, DIB9, DIB8, DIB7, DIB6,
      DIB5, DIB4, DIB3, DIB2, DIB1, DIB0
  };
  wire clock_b = CLKBMUX == "INV" ? ~CLKB : CLKB;
  reg [35:0] out_b = 0;

  wire [10:0] byte_a = DATA_WIDTH_A == 36 ? {address_a[13:5], 2'b0}
                    : DATA_WIDTH_A == 18 ? {address_a[13:4], 1'b0} : address_a[13:3];
  wire [3:0] enable_a = DATA_WIDTH_A == 36 ? address_a[3:0]
                     : DATA_WIDTH_A == 18 ? {2'b0, address_a[1:0]} : 4'b1;
  // Which bits of a byte a narrow port sees, and where.
  wire [2:0] place_a = DATA_WIDTH_A == 4 ? {address_a[2], 2'b0}
                      : DATA_WIDTH_A == 2 ? {address_a[2:1], 1'b0}
                      : DATA_WIDTH_A == 1 ? address_a[2:0] : 3'b0;
  localparam [8:0] BITS_A = DATA_WIDTH_A == 1 ? 9'h1 : DATA_WIDTH_A == 2 ? 9'h3
                           : DATA_WIDTH_A == 4 ? 9'hf : 9'h1ff;
  wire [35:0] old_a = DATA_WIDTH_A >= 18
      ? {memory[byte_a + 3], memory[byte_a + 2], memory[byte_a + 1], memory[byte_a]}
      : {27'h0, (memory[byte_a] >> place_a) & BITS_A};
  wire [35:0] new_a = {
      enable_a[3] ? data_a[35:27] : old_a[35:27], enable_a[2] ? data_a[26:18] : old_a[26:18],
      enable_a[1] ? data_a[17:9] : old_a[17:9], enable_a[0] ? data_a[8:0] : old_a[8:0]};
  always @(posedge clock_a) begin
    if (CEA && WEA && !(RSTA && RESETMODE == "SYNC")) begin
      if (enable_a[0])
        memory[byte_a] <= (memory[byte_a] & ~(BITS_A << place_a))
                       | ((data_a[8:0] & BITS_A) << place_a);
      if (enable_a[1]) memory[byte_a + 1] <= data_a[17:9];
      if (enable_a[2]) memory[byte_a + 2] <= data_a[26:18];
      if (enable_a[3]) memory[byte_a + 3] <= data_a[35:27];
    end
  end
  generate
    if (RESETMODE == "ASYNC") begin : asynchronous_a
      always @(posedge clock_a or posedge RSTA)
        if (RSTA) out_a <= 0;
        else if (CEA)
          if (!WEA || WRITEMODE_A == "READBEFOREWRITE") out_a <= old_a;
          else if (WRITEMODE_A == "WRITETHROUGH") out_a <= new_a;
    end else begin : synchronous_a
      always @(posedge clock_a)
        if (RSTA) out_a <= 0;
        else if (CEA)
          if (!WEA || WRITEMODE_A == "READBEFOREWRITE") out_a <= old_a;
          else if (WRITEMODE_A == "WRITETHROUGH") out_a <= new_a;
    end
  endgenerate

  wire [10:0] byte_b = DATA_WIDTH_B == 36 ? {address_b[13:5], 2'b0}
                    : DATA_WIDTH_B == 18 ? {address_b[13:4], 1'b0} : address_b[13:3];
  wire [3:0] enable_b = DATA_WIDTH_B == 36 ? address_b[3:0]
                     : DATA_WIDTH_B == 18 ? {2'b0, address_b[1:0]} : 4'b1;
  // Which bits of a byte a narrow port sees, and where.
  wire [2:0] place_b = DATA_WIDTH_B == 4 ? {address_b[2], 2'b0}
                      : DATA_WIDTH_B == 2 ? {address_b[2:1], 1'b0}
                      : DATA_WIDTH_B == 1 ? address_b[2:0] : 3'b0;
  localparam [8:0] BITS_B = DATA_WIDTH_B == 1 ? 9'h1 : DATA_WIDTH_B == 2 ? 9'h3
                           : DATA_WIDTH_B == 4 ? 9'hf : 9'h1ff;
  wire [35:0] old_b = DATA_WIDTH_B >= 18
      ? {memory[byte_b + 3], memory[byte_b + 2], memory[byte_b + 1], memory[byte_b]}
      : {27'h0, (memory[byte_b] >> place_b) & BITS_B};
  wire [35:0] new_b = {
      enable_b[3] ? data_b[35:27] : old_b[35:27], enable_b[2] ? data_b[26:18] : old_b[26:18],
      enable_b[1] ? data_b[17:9] : old_b[17:9], enable_b[0] ? data_b[8:0] : old_b[8:0]};
  always @(posedge clock_b) begin
    if (CEB && WEB && !(RSTB && RESETMODE == "SYNC")) begin
      if (enable_b[0])
        memory[byte_b] <= (memory[byte_b] & ~(BITS_B << place_b))
                       | ((data_b[8:0] & BITS_B) << place_b);
      if (enable_b[1]) memory[byte_b + 1] <= data_b[17:9];
      if (enable_b[2]) memory[byte_b + 2] <= data_b[26:18];
      if (enable_b[3]) memory[byte_b + 3] <= data_b[35:27];
    end
  end
  generate
    if (RESETMODE == "ASYNC") begin : asynchronous_b
      always @(posedge clock_b or posedge RSTB)
        if (RSTB) out_b <= 0;
        else if (CEB)
          if (!WEB || WRITEMODE_B == "READBEFOREWRITE") out_b <= old_b;
          else if (WRITEMODE_B == "WRITETHROUGH") out_b <= new_b;
    end else begin : synchronous_b
      always @(posedge clock_b)
        if (RSTB) out_b <= 0;
        else if (CEB)
          if (!WEB || WRITEMODE_B == "READBEFOREWRITE") out_b <= old_b;
          else if (WRITEMODE_B == "WRITETHROUGH") out_b <= new_b;
    end
  endgenerate

  wire [17:0] low = DATA_WIDTH_B == 36 ? out_b[17:0] : out_a[17:0];
  wire [17:0] high = DATA_WIDTH_B == 36 ? out_b[35:18] : out_b[17:0];
  assign {
      DOA17, DOA16, DOA15, DOA14, DOA13, DOA12, DOA11, DOA10, DOA9, DOA8, DOA7, DOA6, DOA5,
      DOA4, DOA3, DOA2, DOA1, DOA0
  } = low;
  assign {
      DOB17, DOB16, DOB15, DOB14, DOB13, DOB12, DOB11, DOB10, DOB9, DOB8, DOB7, DOB6, DOB5,
      DOB4, DOB3, DOB2, DOB1, DOB0
  } = high;
  generate
    if (REGMODE_A != "NOREG" || REGMODE_B != "NOREG"
        || CSDECODE_A != "0b000" || CSDECODE_B != "0b000")
      parameter_of_DP16KD_is_not_modelled fault();
  endgenerate
endmodule
