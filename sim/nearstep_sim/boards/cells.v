// Cells of an ECP5 at the pads of a memory controller, as far as LiteDRAM uses them.

module TRELLIS_IO #(parameter DIR = "INPUT") (inout B, input I, input T, output O);
  assign B = T ? 1'bz : I;
  assign O = B;
endmodule

module OFS1P3BX (input D, PD, SP, SCLK, output reg Q = 1'b0);
  always @(posedge SCLK or posedge PD)
    if (PD) Q <= 1'b1;
    else if (SP) Q <= D;
endmodule

module IFS1P3BX (input D, PD, SP, SCLK, output reg Q = 1'b0);
  always @(posedge SCLK or posedge PD)
    if (PD) Q <= 1'b1;
    else if (SP) Q <= D;
endmodule

module FD1S3BX (input D, CK, PD, output reg Q = 1'b1);
  always @(posedge CK or posedge PD)
    if (PD) Q <= 1'b1;
    else Q <= D;
endmodule
